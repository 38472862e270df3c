#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# An administrator sees several domains, and selects one with --domain.
. "$(dirname "$0")/lib.sh"
start_daemon --set 'domain research.users=65534' --set 'domain research.quota=4M'
shape='--layers 2 --kv-heads 2 --head-dim 8 --vocab 1000 --dtype f16'

# shellcheck disable=SC2086 # $shape is words
{
        kvctl 0 space create llama $shape
        kvctl 0 --domain research space create llama $shape --block-tokens 32
        kvctl 0 --domain research space create other $shape
}
kvctl 0 spaces
says '^SPACE  DOMAIN ' '^llama  uid-' '^llama  research ' '^other  research '
kvctl 0 spaces --domain research
says '^llama ' '^other '
says_not DOMAIN uid- # one domain only: no need to name it
kvctl 0 stat
says '^DOMAIN .* SPACE .* COUNTER' '^research *other *allocated '
kvctl 0 stat llama --json # the space of one's own domain comes first
says_not research
kvctl 0 stat other --json # only one domain has it
says '"domain": "research"'
kvctl 0 stat llama --domain research --json
says '"domain": "research"'
kvctl 0 blocks other
kvctl 2 blocks
complains '3 spaces'
kvctl 0 domain # as much of everything as the quota is of the pool
says '^DOMAIN  *COST  *USED  *GUARANTEED  *MOST ' '^research  pool  .* 4194304 .*bytes' '^research  spaces  *2 ' '^uid-.*  spaces  *1 '
kvctl 0 domain --domain research --json
says '"cost": "overhead"' '"used": 2,'
says_not uid-
kvctl 0 check
says '^uid-.* llama ' '^research  other '
kvctl 0 check llama --domain research
says '^llama '
kvctl 0 evict other --all
kvctl 1 space set other policy=fifo # changes are made in one's own domain, unless told otherwise
complains other
kvctl 0 --domain research space set other policy=fifo
kvctl 0 --domain research space delete llama
kvctl 0 blocks llama
kvctl 0 dump
json_is_valid
says '"domain": "research"'
kvctl 0 dump --domain research
says_not '"space": "llama"'
kvctl 1 --domain nosuch evict llama --all
finish
