#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# LMCache with kvd: LMCache's own test of a level, which checks data. Pass the same JSON to `lmcache server`.
#
#   sh lmcache_shared.sh [OPTION OF lmcache bench l2 ...]
adapter='{"type": "plugin", "module_path": "kvd.engines.lmcache", "class_name": "Adapter",
          "adapter_params": {"object_bytes": 1048576}}'
exec lmcache bench l2 --l2-adapter "$adapter" --num-keys 32 --data-size-kb 1024 --no-skip-verify "$@"
