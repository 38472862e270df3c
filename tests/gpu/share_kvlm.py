#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""
Four kvlm processes answer from one GPU cache. Their logits are compared with those of a process that shares nothing.

    share_kvlm.py SOURCE BUILD [--tokens N] [--processes N] ...       JSON lines, as tests/gpu/run takes them
"""
import argparse
import array
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), '../lib'))
import instance     # noqa: E402  (needs the path above)


def say(question, answer, ok, **numbers):
    print(json.dumps({'check': 'kvlm', 'question': question, 'answer': answer, 'ok': ok, 'numbers': numbers}), flush=True)


class Stop(Exception):
    pass


class Scene:
    def __init__(self, o):
        self.o, self.daemon = o, None
        self.dir = tempfile.mkdtemp(prefix='kvd-kvlm-')
        self.environment = dict(os.environ, KVD_SOCKET=os.path.join(self.dir, 'kvd.sock'))
        self.device = 'cuda:' + os.environ.get('KVD_GPU', '0')
        self.model = os.path.join(o.source, 'tools/kvlm/model')

    def path(self, *below):
        return os.path.join(self.o.build, *below)

    def start(self):
        self.daemon = instance.start(self.dir, '--backend', 'cuda', '--device', self.device[5:], '--pool', self.o.pool,
                                     kvd=self.path('daemon/kvd'))

    def stop(self):
        if self.daemon:
            self.daemon.terminate()
            try:
                self.daemon.wait(10)
            except subprocess.TimeoutExpired:
                self.daemon.kill()
        shutil.rmtree(self.dir, ignore_errors=True)

    # ---- prompts

    def kvlm(self, *arguments):
        return [self.path('tools/kvlm/kvlm'), '--model', self.model, *arguments]

    def tokens(self, number):
        """Writes the token ids of a prompt to a file: the beginning of a document, and a question about it."""
        folder = os.path.join(self.o.source, 'tools/kvlm/demo')
        with open(os.path.join(folder, f'questions-{number % 2 + 1}.jsonl')) as f:
            question = json.loads(f.readlines()[number])['prompt']
        ids = []
        for text in (open(os.path.join(folder, f'document-{number % 2 + 1}.txt')).read(), question):
            name = os.path.join(self.dir, 'text')
            with open(name, 'w') as f:
                f.write(text)
            r = subprocess.run(self.kvlm('--tokenize', name), capture_output=True, text=True, check=True)
            ids.append(r.stdout.split())
        name = os.path.join(self.dir, f'tokens-{number}')
        with open(name, 'w') as f:
            f.write(' '.join(['1', *ids[0][:self.o.tokens], *ids[1]]))
        return name

    def run(self, tokens, name, *arguments):
        logits = os.path.join(self.dir, name)
        return logits, subprocess.Popen(
            self.kvlm('--tokens', tokens, '--logits', logits, '--json', '--max-tokens', self.o.answer, '--device', self.device,
                      '--decode', 'exact', *arguments),
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def read_logits(name):
    numbers = array.array('f')
    with open(name, 'rb') as f:
        numbers.frombytes(f.read())
    return numbers


def largest_difference(a, b):
    if len(a) != len(b):
        return float('inf')
    return max(map(abs, (x - y for x, y in zip(a, b))), default=0.0) if a.tobytes() != b.tobytes() else 0.0


def finish(process, what):
    out, err = process.communicate(timeout=600)
    if process.returncode != 0:
        raise Stop(f'{what}: status {process.returncode}: {err.strip()[-300:]}')
    return json.loads(out.splitlines()[0])


def compare(scene):
    processes = scene.o.processes
    question = f'{processes} kvlm processes share one GPU cache: are their logits those of a process that shares nothing?'
    prompts = [scene.tokens(i) for i in range(processes)]
    alone = []
    for i, prompt in enumerate(prompts):
        logits, process = scene.run(prompt, f'alone-{i}', '--no-share')
        finish(process, 'alone')
        alone.append(read_logits(logits))
    worst, reused, total, wrong = 0.0, 0, 0, 0
    begin = time.time()
    for turn in range(2):  # in the second turn, everything is in the cache
        running = [scene.run(prompt, f'shared-{i}', '--verify') for i, prompt in enumerate(prompts)]
        for i, (logits, process) in enumerate(running):
            said = finish(process, 'shared')
            worst = max(worst, largest_difference(alone[i], read_logits(logits)))
            reused += said.get('reused_tokens', said.get('reused', 0))
            total += said.get('prompt_tokens', said.get('tokens', 0))
            wrong += said.get('wrong_bytes', 0)
    say(question, f'largest difference {worst:g}, {reused} of {total} prompt tokens reused, {wrong} wrong bytes',
        worst == 0 and wrong == 0 and reused > 0, largest_difference=worst, tokens_reused=reused, tokens=total,
        wrong_bytes=wrong, seconds=round(time.time() - begin, 2))


def main():
    p = argparse.ArgumentParser()
    p.add_argument('source')
    p.add_argument('build')
    p.add_argument('--tokens', type=int, default=1500)
    p.add_argument('--pool', default='1G')
    p.add_argument('--answer', default='8')
    p.add_argument('--processes', type=int, default=4)
    o = p.parse_args()
    scene = Scene(o)
    try:
        if '--device' not in subprocess.run(scene.kvlm('--help'), capture_output=True, text=True).stdout:
            say('does kvlm compute on a GPU?', 'not run: this kvlm has no --device', None)
            return 0
        scene.start()
        compare(scene)
    except (Stop, instance.Failed, subprocess.SubprocessError, OSError) as why:
        say('do kvlm processes share one GPU cache?', str(why), False)
    finally:
        scene.stop()
    return 0


sys.exit(main())
