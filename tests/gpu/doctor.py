#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The output of `kvctl doctor` on this machine, as lines of tests/gpu/run.    doctor.py KVCTL"""
import json
import os
import subprocess
import sys


def main():
    device = os.environ.get('KVD_GPU', '0')
    r = subprocess.run([sys.argv[1], 'doctor', device, '--json'], capture_output=True, text=True)
    try:
        said = json.loads(r.stdout)
    except ValueError:
        print(f'doctor: status {r.returncode}: {r.stderr.strip()}')
        return 1
    for row in said['findings']:
        if row['part'] != 'GPU':
            continue
        print(json.dumps({'check': 'doctor', 'question': row['tried'], 'answer': f"{row['state']}: {row['found']}",
                          'ok': {'ok': True, 'missing': False}.get(row['state']), 'numbers': {}}))
    print(json.dumps({'check': 'doctor', 'question': 'what will kvd do?', 'ok': None, 'numbers': {},
                      'answer': '; '.join(f'{k}: {v}' for k, v in said['kvd'].items())}))
    return 0


sys.exit(main())
