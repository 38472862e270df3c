#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the parts of tests/gpu/run, most important first, within one budget of time. See the comment there."""
import argparse
import datetime
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time

NEEDS = 8  # seconds that are left for writing results


class Stop(Exception):
    pass


class Runner:
    def __init__(self, options):
        self.options = options
        self.results, self.parts = [], []
        self.child = None
        self.device = None
        self.end = options.begin + options.seconds
        self.scratch = tempfile.mkdtemp(prefix='kvd-gpu-')
        self.environment = dict(os.environ, KVD=self.path('daemon/kvd'), KVCTL=self.path('tools/kvctl/kvctl'),
                                KVLM=self.path('tools/kvlm/kvlm'), TMPDIR=self.scratch,
                                KVLM_MODEL=os.path.join(options.root, 'tools/kvlm/model'))

        self.find_cublas()

    def find_cublas(self):
        """kvlm wants libcublas, which often lies where only a toolkit or PyTorch looks."""
        folders = ['/usr/local/cuda/lib64', '/usr/local/cuda/targets/x86_64-linux/lib']
        for path in sys.path:
            folders += glob.glob(os.path.join(path, 'nvidia', '*', 'lib'))
        found = [f for f in folders if glob.glob(os.path.join(f, 'libcublas.so.1[23]'))]
        if found:
            self.environment['LD_LIBRARY_PATH'] = ':'.join(filter(None, [os.environ.get('LD_LIBRARY_PATH'), *found[:1]]))

    def path(self, *below):
        return os.path.join(self.options.build, *below)

    def source(self, *below):
        return os.path.join(self.options.root, *below)

    def left(self):
        return self.end - time.time() - NEEDS

    # ---- results

    def say(self, result):
        if self.device and 'driver' not in result:
            result['driver'] = self.device['answer']
        self.results.append(result)
        print(json.dumps(result), flush=True)

    def take(self, part, text):
        """JSON lines of a program; anything else is returned."""
        other = []
        for line in text.splitlines():
            try:
                result = json.loads(line)
            except ValueError:
                other.append(line)
                continue
            if isinstance(result, dict):
                if result.get('check') == 'device':
                    if self.device:
                        continue
                    self.device = result
                self.say({'part': part, **result})
        return other

    # ---- programs

    def kill(self):
        if self.child and self.child.poll() is None:
            os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()

    def run(self, command, limit, environment=None):
        """(exit status or None if it ran out of time, what it printed, seconds)"""
        begin = time.time()
        with tempfile.TemporaryFile() as out:
            self.child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                          env=dict(self.environment, **(environment or {})), start_new_session=True)
            try:
                status = self.child.wait(timeout=max(1, min(limit, self.left())))
            except subprocess.TimeoutExpired:
                status = None
            finally:
                self.kill()  # and what it left behind in its group
            out.seek(0)
            text = out.read().decode(errors='replace')
        self.child = None
        return status, text, time.time() - begin

    def program(self, part, name, command, limit, environment=None):
        """A program that prints JSON lines itself; its end is a result only if it is a bad one."""
        status, text, seconds = self.run(command, limit, environment)
        other = self.take(part, text)
        if status not in (0, 77):
            ended = f'it ran for {seconds:.0f} s' if status is None else f'status {status}'
            self.say({'part': part, 'check': name, 'question': 'does the program end well?', 'ok': False,
                      'answer': ended, 'numbers': {'seconds': round(seconds, 1)}, 'said': other[-12:]})
        return status

    def checked(self, part, name, command, limit, environment=None, question=None):
        """A program of the library Check, or one whose exit status is its result."""
        status, text, seconds = self.run(command, limit, environment)
        counts = re.search(r'(\d+)%: Checks: (\d+), Failures: (\d+), Errors: (\d+)', text)
        numbers = {'seconds': round(seconds, 2)}
        if counts:
            numbers.update(zip(('checks', 'failures', 'errors'), map(int, counts.groups()[1:])))
        answer = {0: 'passed', 77: 'not run here', None: f'out of time after {seconds:.0f} s'}.get(status, f'status {status}')
        result = {'part': part, 'check': name, 'question': question or 'do the tests pass?', 'answer': answer,
                  'ok': None if status == 77 else status == 0, 'numbers': numbers}
        if status != 0:
            result['said'] = text.splitlines()[-12:]
        self.say(result)
        return status

    # ---- the parts

    def checks(self, limit):
        """what driver and device do: ten questions"""
        status = self.program('checks', 'checks', [self.path('tests/gpu/gpu-checks')], limit)
        if not self.device or status == 77:
            raise Stop('no driver, or no device')
        self.program('checks', 'T9', [sys.executable, self.source('tests/gpu/check_dlpack.py'), self.device['answer']], 60)

    def kernels(self, limit):
        """kernels' results equal their references'"""
        for name in self.kernel_tests():
            self.checked('kernels', name, [self.path('tests/kernels/cuda', 'test-cuda-' + name)], min(90, limit),
                         {'KVD_TEST_GPU': '1', 'CK_FORK': 'no'}, f'{name}: do kernels and references agree on the device?')

    # of tests/gpu/device, those that need nothing of a stand-in's settings
    PLAYS = ['in-place', 'memory-changes-hands', 'arena-is-read-only', 'daemon-killed', 'layers']

    def processes(self, limit):
        """processes that share a cache, and die"""
        self.program('processes', 'doctor', [sys.executable, self.source('tests/gpu/doctor.py'),
                                             self.path('tools/kvctl/kvctl')], 120)
        self.program('processes', 'share', [self.path('tests/gpu/gpu-share')], 120)
        for play in self.PLAYS:
            self.checked('processes', play, [self.path('tests/gpu/device/test-plays'), play], 40,
                         question=f'{play}: does it go as on the stand-in?')
        self.program('processes', 'kvlm', [sys.executable, self.source('tests/gpu/share_kvlm.py'), self.source(),
                                           self.options.build], 120)

    RATIOS = [('KeyDiff anchor and score', 'KeyDiff by PyTorch, 128 k', 'KeyDiff: how many times faster than PyTorch?', 5),
              ('paged decode attention', 'scaled_dot_product_attention, 64', 'decode: PyTorch over contiguous keys, as times of ours',
               1)]

    def time_of(self, begins):
        times = [r['numbers']['us'] for r in self.results
                 if r.get('part') == 'benchmarks' and r['question'].startswith(begins) and 'us' in r['numbers']]
        return times[0] if times else None

    def ratio(self, ours, theirs, question, aim):
        us, beside = self.time_of(ours), self.time_of(theirs)
        if not us or not beside:
            self.say({'part': 'benchmarks', 'check': 'peer', 'question': question, 'ok': None, 'numbers': {},
                      'answer': 'not run: one of the two was not measured'})
            return
        self.say({'part': 'benchmarks', 'check': 'peer', 'question': question, 'ok': beside / us >= aim,
                  'answer': f'{beside / us:.2f} (aim: {aim})', 'numbers': {'us': us, 'pytorch_us': beside, 'aim': aim}})

    def benchmarks(self, limit):
        """how fast"""
        self.program('benchmarks', 'bench', [self.path('tests/gpu/gpu-bench')], min(150, limit))
        self.program('benchmarks', 'peer', [sys.executable, self.source('tests/gpu/peer.py')], 90)
        for ours, theirs, question, aim in self.RATIOS:
            self.ratio(ours, theirs, question, aim)

    def sanitizer(self, limit):
        """compute-sanitizer on the kernels' tests"""
        tool = shutil.which('compute-sanitizer') or '/usr/local/cuda/bin/compute-sanitizer'
        if not os.access(tool, os.X_OK):
            self.say({'part': 'sanitizer', 'check': 'compute-sanitizer', 'question': 'do its tools find anything?',
                      'answer': 'not run: it is not installed here', 'ok': None, 'numbers': {}})
            return
        for which in ('memcheck', 'racecheck'):
            for name in self.kernel_tests():
                if self.left() < 15:
                    self.not_run('sanitizer', f'{which} {name}')
                    continue
                self.checked('sanitizer', f'{which} {name}',
                             [tool, '--tool', which, '--error-exitcode', '9',
                              self.path('tests/kernels/cuda', 'test-cuda-' + name)],
                             120, {'KVD_TEST_GPU': '1', 'CK_FORK': 'no'},
                             f'{name} under {which}: anything found?')

    def kernel_tests(self):
        with open(self.path('tests/gpu/kernel-tests')) as f:
            return f.read().split()

    def not_run(self, part, name):
        self.say({'part': part, 'check': name, 'question': 'was it run?', 'answer': 'not run: out of time', 'ok': None,
                  'numbers': {}})

    # ---- all of them

    PARTS = [('checks', 200, 20), ('kernels', 150, 15), ('processes', 150, 20), ('benchmarks', 170, 30),
             ('sanitizer', 500, 20)]  # name, seconds at most, seconds that it needs at least

    def wanted(self, name):
        return not self.options.only or name in self.options.only.split(',')

    def all(self):
        for name, limit, least in self.PARTS:
            if not self.wanted(name):
                if name == 'checks':  # who answers, at least
                    status = self.program('checks', 'device', [self.path('tests/gpu/gpu-checks'), '--only', 'none'], 30)
                    if not self.device or status == 77:
                        raise Stop('no driver, or no device')
                continue
            begin = time.time()
            if self.left() < least:
                self.not_run(name, name)
            else:
                getattr(self, name)(min(limit, self.left()))
            self.parts.append((name, time.time() - begin))

    # ---- in the end

    def stand_in(self):
        return not self.device or 'STAND-IN' in self.device['answer']

    def commit(self):
        try:
            with open(self.path('COMMIT')) as f:
                return f.read().strip()
        except OSError:
            pass
        r = subprocess.run(['git', '-C', self.options.root, 'describe', '--always', '--dirty', '--abbrev=40'],
                           capture_output=True, text=True)
        return r.stdout.strip() or 'unknown'

    def counts(self, part):
        oks = [r.get('ok') for r in self.results if r.get('part') == part]
        late = sum(r.get('part') == part and 'out of time' in str(r.get('answer')) and r.get('ok') is None
                   for r in self.results)
        return oks.count(True), oks.count(False), oks.count(None) - late, late

    def table(self, to):
        print(f'\n{"PART":<12}{"SECONDS":>9}{"YES":>7}{"NO":>6}{"OPEN":>7}{"NO TIME":>9}', file=to)
        for part, seconds in self.parts:
            print(f'{part:<12}{seconds:>9.1f}' + ''.join(f'{n:>{w}}' for n, w in zip(self.counts(part), (7, 6, 7, 9))),
                  file=to)
        for r in self.results:
            if r.get('ok') is False:
                print(f'  NO: {r.get("part")} {r.get("check")}: {r.get("question")} {r.get("answer")}', file=to)
        print(f'on {self.device["answer"] if self.device else "nothing"}, commit {self.commit()}', file=to)

    def file_name(self):
        results = os.path.realpath(self.source('tests/gpu/results'))
        if self.options.out:
            out = os.path.realpath(self.options.out)
            if self.stand_in() and os.path.commonpath([out, results]) == results:
                raise Stop('results of a stand-in are not kept among those of GPUs')
            return out
        if self.stand_in():
            return None
        device = re.sub(r'[^a-z0-9]+', '-', self.device['answer'].split(',')[0].lower()).strip('-')
        return os.path.join(results, f'{datetime.date.today()}-{device}.json')

    def write(self):
        name = self.file_name()
        if not name:
            print('not written: what answered is not a GPU', file=sys.stderr)
            return
        os.makedirs(os.path.dirname(name), exist_ok=True)
        with open(name, 'w') as f:
            json.dump({'device': self.device and self.device['answer'], 'stand_in': self.stand_in(),
                       'date': datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds'),
                       'commit': self.commit(), 'seconds': round(time.time() - self.options.begin, 1),
                       'parts': {p: dict(zip(('yes', 'no', 'open', 'out_of_time'), self.counts(p)), seconds=round(s, 1))
                                 for p, s in self.parts},
                       'results': self.results}, f, indent=1)
            f.write('\n')
        print(f'written: {name}', file=sys.stderr)


def options():
    p = argparse.ArgumentParser(add_help=False)
    p.add_argument('--root', required=True)
    p.add_argument('--build', required=True)
    p.add_argument('--begin', type=float, default=time.time())
    p.add_argument('--seconds', type=float, default=530)
    p.add_argument('--only')
    p.add_argument('--out')
    p.add_argument('--list', action='store_true')
    o = p.parse_args()
    o.build = os.path.abspath(o.build)
    return o


def interrupted(signal_number, frame):
    raise KeyboardInterrupt


def main():
    o = options()
    if o.list:
        for name, limit, least in Runner.PARTS:
            print(f'{name:<12} {getattr(Runner, name).__doc__}')
        return 0
    signal.signal(signal.SIGTERM, interrupted)
    packed = os.path.join(o.build, 'kvd.tar.xz')
    if os.path.exists(packed):  # tests/gpu/pack
        o.build = tempfile.mkdtemp(prefix='kvd-gpu-build-')
        with tarfile.open(packed) as archive:
            archive.extractall(o.build)
    runner = Runner(o)
    status = 0
    try:
        runner.file_name() if o.out else None
        runner.all()
    except Stop as stop:
        print(f'tests/gpu/run: {stop}', file=sys.stderr)
        status = 77
    except KeyboardInterrupt:
        print('tests/gpu/run: interrupted', file=sys.stderr)
        status = 130
    finally:
        runner.kill()
        shutil.rmtree(runner.scratch, ignore_errors=True)
    if not status:
        status = int(any(r.get('ok') is False for r in runner.results))
        try:
            runner.write()
        except Stop as stop:
            print(f'tests/gpu/run: {stop}', file=sys.stderr)
            status = 2
        runner.table(sys.stdout)
    if os.path.exists(packed):
        shutil.rmtree(o.build, ignore_errors=True)
    return status


sys.exit(main())
