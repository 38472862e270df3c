#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# kvctl size: for a model's config.json, it prints exactly the sizes that a daemon would have; and its refusals. kvctl
# status: how many blocks of a type the pool holds. ROOT is the source tree.
. "$(dirname "$0")/lib.sh"
: "${ROOT:?source tree}"
start_daemon --pool 128M

# config JSON: writes it to $dir/model.json
config() {
        echo "$1" >"$dir/model.json"
}

# is NAME VALUE...: members of the object "size" in the last output
is() {
        python3 - "$dir/out" "$@" <<'EOS' || wrong "$what: not $*"
import json, sys
size, want = json.load(open(sys.argv[1]))["size"], sys.argv[2:]
assert all(str(size[name]) == value for name, value in zip(want[::2], want[1::2])), size
EOS
}

# a daemon's figures: the block size, and the index of as many blocks
kvctl 0 size "$ROOT/tools/kvlm/model" --context 4096 --users 8 --shared 2048 --json
is layers 8 kv_heads 2 head_dim 32 dtype f32 block_bytes 65536 token_bytes 4096
is pool_bytes $(((128 + 8 * 128) * 65536)) unshared_bytes $((8 * 256 * 65536))
cp "$dir/out" "$dir/size"
kvctl 0 space create m --layers 8 --kv-heads 2 --head-dim 32 --dtype f32 --vocab 760 --max-blocks 1152
kvctl 0 spaces --json
python3 - "$dir/out" "$dir/size" <<'EOS' || wrong "the daemon's space has other sizes"
import json, sys
made, said = json.load(open(sys.argv[1]))["spaces"][0], json.load(open(sys.argv[2]))["size"]
assert made["block_bytes"] == said["block_bytes"]
assert 0 <= made["index_bytes"] - said["index_bytes"] <= 4096, (made, said)  # the versions of segments
EOS

# The table says how many blocks of a model the pool holds as f16, q8 and q4: 131,072, 69,632 and 36,864 bytes each.
for dtype in f16 q8 q4; do
        kvctl 0 space create "as-$dtype" --layers 8 --kv-heads 4 --head-dim 64 --dtype $dtype --vocab 760
done
kvctl 0 status
says '^as-f16  8x4x64 f16 x 16  lru  *128 KiB  1024  ' '^as-q8  *8x4x64 q8 x 16  *lru  *68.0 KiB  1927  ' \
     '^as-q4  *8x4x64 q4 x 16  *lru  *36.0 KiB  3640  '
python3 - "$dir/out" <<'EOS' || wrong "the pool does not hold 1.88 and 3.55 times as many"
import sys
rows = [line.split() for line in open(sys.argv[1])]
(head,) = [row for row in rows if row[:2] == ["SPACE", "SHAPE"]]
most = {row[0]: int(row[head.index("MOST") + 4]) for row in rows if row and row[0].startswith("as-")}    # f16, x, 16, KiB
assert [round(most[name] / most["as-f16"], 2) for name in ("as-q8", "as-q4")] == [1.88, 3.55], most
EOS

# only whole blocks are shared: 20 tokens in common are one block, and each request has its own copy of the other four
kvctl 0 size "$ROOT/tools/kvlm/model/config.json" --context 33 --users 3 --shared 20 --json
is shared_bytes 65536 own_bytes $((2 * 65536)) pool_bytes $((7 * 65536)) unshared_bytes $((9 * 65536))
kvctl 0 size "$ROOT/tools/kvlm/model" --context 4000 --users 8 --shared 2000
says '^8 requests of 4000 tokens, 2000 of them in common' 'pool = 71M at least' '^the pool  *70.3 MiB$'
fits 80

# names by family and age; a model inside a model
config '{"n_layer": 12, "n_head": 12, "n_embd": 768, "torch_dtype": "float16"}'
kvctl 0 size "$dir/model.json" --context 16 --json
is layers 12 kv_heads 12 head_dim 64 dtype f16 block_bytes $((12 * 2 * 12 * 64 * 2 * 16))
config '{"dtype": "bfloat16", "text_config": {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
         "hidden_size": 512, "sliding_window": null, "layer_types": ["full_attention", "full_attention"]}}'
kvctl 0 size "$dir/model.json" --context 16 --block-tokens 32 --json
is layers 4 kv_heads 2 head_dim 64 dtype bf16 block_tokens 32
kvctl 0 size "$dir/model.json" --context 16 --dtype i8 --json
is dtype i8 token_bytes $((4 * 2 * 2 * 64))
kvctl 0 size "$dir/model.json" --context 16 --dtype q8 --json
is dtype q8 token_bytes $((4 * 2 * 2 * (64 + 4)))
kvctl 0 size "$dir/model.json" --context 16 --dtype q4 --json
is dtype q4 token_bytes $((4 * 2 * 2 * (32 + 4)))
config '{"num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 63, "hidden_size": 512, "dtype": "float16"}'
kvctl 1 size "$dir/model.json" --context 16 --dtype q4
complains 'head_dim must be even with dtype q8 or q4'

# engines do not share these, so they have no size
config '{"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512, "dtype": "float32", "kv_lora_rank": 64}'
kvctl 1 size "$dir/model.json" --context 16
complains 'latent attention'
config '{"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512, "dtype": "float32", "sliding_window": 64}'
kvctl 1 size "$dir/model.json" --context 16
complains 'sliding windows'
config '{"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512, "layer_types": ["linear_attention"]}'
kvctl 1 size "$dir/model.json" --context 16
complains 'linear_attention'

kvctl 1 size "$dir/none" --context 16
complains "$dir/none: No such file"
config '[]'
kvctl 1 size "$dir/model.json" --context 16
complains 'no JSON object'
config '{"num_hidden_layers": -1}'
kvctl 1 size "$dir/model.json" --context 16
complains 'num_hidden_layers'
config '{"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}'
kvctl 2 size "$dir/model.json" --context 16
complains 'say --dtype'
kvctl 2 size "$dir/model.json"
complains '--context'
kvctl 2 size "$dir/model.json" --context 16 --shared 17
complains '--shared is a part of --context'
finish
