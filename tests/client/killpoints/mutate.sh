#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Copies a source with one thing broken: mutate.sh IN OUT SED-SCRIPT. Each line of the script must change something.
cp "$1" "$2" || exit 1
grep -v '^#' "$3" | while IFS= read -r expression; do
        sed -e "$expression" "$2" >"$2.new" || exit 1
        if cmp -s "$2" "$2.new"; then
                echo "$1 does not contain what $3 breaks: $expression" >&2
                exit 1
        fi
        mv "$2.new" "$2"
done
