# SPDX-License-Identifier: Apache-2.0
# From kernels/cuda/RESOURCES.txt: how much shared memory each kernel has itself, in C.
BEGIN { print "#include \"tests/gpu/fakecuda/kernels.h\"\n\nconst struct fake_own fake_own[] = {" }
$2 ~ /^kvd_/ && $NF > 0 { printf "        {\"%s\", %d},\n", $2, $NF }
END { print "        {0, 0},\n};" }
