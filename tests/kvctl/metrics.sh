#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Metrics: the text is in Prometheus's format, or OpenMetrics on request; the figures are those of the other verbs; and
# the server survives its clients and the daemon.
. "$(dirname "$0")/lib.sh"
command -v python3 >/dev/null 2>&1 || exit 77
: "${ROOT:?source tree}"

start_daemon
start_filler llama
kvctl 0 metrics
cp "$dir/out" "$dir/text"
python3 "$here/openmetrics.py" "$dir/text" || wrong "$what: see above"
kvctl 0 metrics --json
json_is_valid
says '"name": "kvd_space_tokens_found_total"' '"labels": "domain='
kvctl 0 dump
python3 "$here/openmetrics.py" "$dir/text" "$dir/out" || wrong "$what: other figures than kvctl dump"

# dashboard and alerts name only existing metrics
python3 "$here/boards.py" "$ROOT" "$dir/text" || wrong 'dashboard or alerts: see above'
if command -v promtool >/dev/null 2>&1; then
        promtool check rules "$ROOT/tools/monitoring/alerts.yaml" >"$dir/out" 2>&1 || wrong "promtool: alerts.yaml"
        promtool check metrics <"$dir/text" >"$dir/out" 2>"$dir/err" || wrong "promtool: kvctl metrics"
fi

if command -v prometheus >/dev/null 2>&1 && command -v promtool >/dev/null 2>&1 && python3 -c "import yaml" 2>/dev/null; then
        python3 "$here/prometheus.py" "$ROOT" "$KVCTL" "$dir" || wrong 'a real Prometheus: see above'
fi

# addresses at which it does not listen
kvctl 2 metrics --listen 0.0.0.0:9464
complains 'other machines could reach that'
kvctl 2 metrics --listen '[::]:0'
kvctl 2 metrics --listen 9464x
complains 'takes /a/path, PORT or ADDRESS:PORT'
kvctl 2 metrics --listen 127.0.0.1:0 --json
kvctl 1 metrics --listen "$dir/none/metrics"
complains 'cannot listen at'
kvctl 1 metrics --listen "$KVD_SOCKET"
[ -S "$KVD_SOCKET" ] || wrong "$what: takes the daemon's own socket away"

python3 "$here/scrapes.py" "$KVCTL" "$KVD" "$dir" "$daemon" || wrong 'kvctl metrics --listen: see above'
[ -e "$dir/metrics.sock" ] && wrong 'the socket stays behind'
finish
