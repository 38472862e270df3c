#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the parts of tests/gpu/run, most important first, within one budget of time. See the comment there."""
import argparse
import contextlib
import datetime
import functools
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

import predict

NEEDS = 8    # seconds reserved for ending everything
REAPED = 10  # seconds that a killed process may take to end; one that is stuck in the driver never ends


class Stop(Exception):
    def __init__(self, why, status=77):
        super().__init__(why)
        self.status = status


class Runner:
    def __init__(self, options):
        self.options = options
        self.results, self.parts, self.stuck = [], [], []
        self.child = self.holder = None
        self.device = None
        self.file = None
        self.ended = 'not yet'
        self.end = self.part_end = options.begin + options.seconds
        self.scratch = tempfile.mkdtemp(prefix='kvd-gpu-')
        self.environment = dict(os.environ, KVD=self.path('daemon/kvd'), KVCTL=self.path('tools/kvctl/kvctl'),
                                KVLM=self.path('tools/kvlm/kvlm'), TMPDIR=self.scratch,
                                KVLM_MODEL=os.path.join(options.root, 'tools/kvlm/model'))

        self.find_cublas()

    def find_cublas(self):
        """kvlm needs libcublas, which is often installed where only a toolkit or PyTorch finds it."""
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
        return min(self.end - NEEDS, self.part_end) - time.time()

    # ---- results

    def say(self, result):
        if self.device and 'driver' not in result:
            result['driver'] = self.device['answer']
        self.results.append(result)
        print(json.dumps(result), flush=True)

    def take(self, part, text):
        """Takes the JSON lines of a program as results. Returns the other lines."""
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

    def kill(self, child):
        """Kills the process and its group. A process that is stuck in the driver stays, and is reported."""
        if not child:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        try:
            child.wait(timeout=self.options.reaped)
        except subprocess.TimeoutExpired:
            self.stuck.append(child.pid)
            self.say({'part': 'driver', 'check': 'stuck', 'question': 'does a killed process end?', 'ok': False,
                      'numbers': {'seconds': self.options.reaped},
                      'answer': f'process {child.pid} ({os.path.basename(str(child.args[0]))}) did not end when it was killed: '
                                'it is stuck in the driver'})

    def start(self, command, out, environment=None, stdin=subprocess.DEVNULL):
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=stdin, start_new_session=True,
                                env=dict(self.environment, **(environment or {})))

    def run(self, command, limit, environment=None):
        """Returns (exit status, or None if it ran out of time; its output; seconds)."""
        begin = time.time()
        with tempfile.TemporaryFile() as out:
            self.child = self.start(command, out, environment)
            try:
                status = self.child.wait(timeout=max(1, min(limit, self.options.each, self.left())))
            except subprocess.TimeoutExpired:
                status = None
            self.kill(self.child)
            self.child = None
            out.seek(0)
            text = out.read().decode(errors='replace')
        return status, text, time.time() - begin

    def program(self, part, name, command, limit, environment=None):
        """Runs a program that prints JSON lines itself. Its exit status is a result only if it is bad."""
        status, text, seconds = self.run(command, limit, environment)
        other = self.take(part, text)
        if status not in (0, 77):
            ended = f'it ran for {seconds:.0f} s' if status is None else f'status {status}'
            self.say({'part': part, 'check': name, 'question': 'does the program end well?', 'ok': False,
                      'answer': ended, 'numbers': {'seconds': round(seconds, 1)}, 'said': other[-12:]})
        self.write()
        return status

    def checked(self, part, name, command, limit, environment=None, question=None):
        """Runs a test program that uses Check, or another one whose exit status is its result."""
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
        self.write()
        return status

    # ---- the parts

    SMI = ('Driver Version', 'Persistence Mode', 'Compute Mode', 'Current', 'Virtualization Mode')

    def smi(self):
        """Settings that explain surprises, from nvidia-smi."""
        result = {'part': 'driver', 'check': 'nvidia-smi', 'question': 'how is the device set?', 'ok': None, 'numbers': {}}
        try:
            text = subprocess.run(['nvidia-smi', '-q'], capture_output=True, text=True, timeout=60).stdout
            pairs = [[word.strip() for word in line.split(':', 1)] for line in text.splitlines() if ':' in line]
            result['answer'] = ', '.join(f'{name}: {value}' for name, value in pairs if name in self.SMI) or 'nothing'
        except (OSError, subprocess.TimeoutExpired) as e:
            result['answer'] = f'not asked: {e}'
        self.say(result)

    def ask_device(self):
        status = self.program('driver', 'device', [self.path('tests/gpu/gpu-checks'), '--only', 'none'], 60)
        if not self.device or status == 77:
            raise Stop('no driver, or no device')

    def hold(self):
        """Keeps a context during the run: without one, some drivers shut the device down between two programs."""
        self.holder = self.start([self.path('tests/gpu/gpu-checks'), '--hold'], subprocess.DEVNULL, stdin=subprocess.PIPE)

    def driver(self):
        """how the device is set, and how driver and device behave: the questions that decide most about kvd first"""
        self.smi()
        self.program('driver', 'doctor', [sys.executable, self.source('tests/gpu/doctor.py'),
                                          self.path('tools/kvctl/kvctl')], 60)
        self.program('driver', 'checks', [self.path('tests/gpu/gpu-checks'), '--only', 'T5,T8,T4,T1,T2,T3,T7,T10'], 240)

    def order_fails(self):
        """Sharing memory between streams relies on this answer."""
        return any(r.get('check') == 'T4' and r.get('ok') is False and
                   'in registered host memory, released by another process' in r['question'] for r in self.results)

    def kernels(self):
        """kernels' results equal their references'"""
        for name in self.kernel_tests():
            self.checked('kernels', name, [self.path('tests/kernels/cuda', 'test-cuda-' + name)], 90,
                         {'KVD_TEST_GPU': '1', 'CK_FORK': 'no'}, f'{name}: do kernels and references agree on the device?')

    # plays of tests/gpu/device that need no settings of the stand-in
    PLAYS = ['memory-changes-hands', 'arena-is-read-only', 'daemon-killed', 'layers', 'capturing', 'two-clients']

    def processes(self):
        """processes that share a cache, and die"""
        self.program('processes', 'share', [self.path('tests/gpu/gpu-share')], 120)
        self.checked('processes', 'batch', [self.path('tests/client/test-batch')], 90,
                     question='attention over sequences: is it that of the processor?')
        for play in self.PLAYS:
            self.checked('processes', play, [self.path('tests/gpu/device/test-plays'), play], 40,
                         question=f'{play}: does it go as on the stand-in?')

    def deaths(self):
        """when the work of a killed process stops"""
        self.program('deaths', 'checks', [self.path('tests/gpu/gpu-checks'), '--only', 'T6'], 120)

    SMALL = ['--tokens', '32', '--pool', '64M', '--answer', '1', '--processes', '2']  # a processor is slower than a GPU

    def models(self):
        """a model's logits over a shared cache, and PyTorch over its blocks"""
        self.program('models', 'kvlm', [sys.executable, self.source('tests/gpu/share_kvlm.py'), self.source(),
                                        self.options.build, *(self.SMALL if self.stand_in() else [])], 120)
        self.program('models', 'T9', [sys.executable, self.source('tests/gpu/check_dlpack.py'), self.device['answer']], 60)

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

    def confirm(self):
        """Compares predict.py's predictions from machine code with the measurements."""
        device = next((name for name in predict.DEVICES if name in self.device['answer']), None)
        shares = {r['question']: r['numbers']['share'] for r in self.results if 'share' in r.get('numbers', {})}
        for begins, kernel in predict.BENCHES.items() if device else ():
            measured = next((share for question, share in shares.items() if question.startswith(begins)), None)
            if measured is None:
                continue
            predicted = predict.table()[kernel][device]
            self.say({'part': 'benchmarks', 'check': 'prediction', 'ok': abs(measured - predicted) <= predict.NEAR,
                      'question': f'{kernel}: is its share of the bandwidth what its machine code lets expect?',
                      'answer': f'{measured:.2f}, and {predicted:.2f} was predicted',
                      'numbers': {'measured': measured, 'predicted': predicted}})

    def benchmarks(self):
        """how fast"""
        self.program('benchmarks', 'bench', [self.path('tests/gpu/gpu-bench')], 150)
        self.program('benchmarks', 'peer', [sys.executable, self.source('tests/gpu/peer.py')], 90)
        for ours, theirs, question, aim in self.RATIOS:
            self.ratio(ours, theirs, question, aim)
        self.confirm()

    def sanitizer(self):
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
        """Attention comes first: decoding depends on it."""
        with open(self.path('tests/gpu/kernel-tests')) as f:
            return sorted(f.read().split(), key=lambda name: not name.startswith('attend'))

    def not_run(self, part, name, why='out of time'):
        self.say({'part': part, 'check': name, 'question': 'was it run?', 'answer': f'not run: {why}', 'ok': None,
                  'numbers': {}})

    # ---- all of them

    PARTS = [('driver', 280, 20), ('kernels', 150, 15), ('processes', 180, 20), ('deaths', 100, 20),
             ('benchmarks', 240, 30), ('models', 150, 20), ('sanitizer', 500, 20)]  # name, maximum and minimum seconds
    ORDERED = ('processes', 'models')

    def wanted(self, name):
        return not self.options.only or name in self.options.only.split(',')

    def run_part(self, name, least):
        if self.left() < least:
            self.not_run(name, name)
        elif name in self.ORDERED and self.order_fails():
            self.not_run(name, name, 'streams of two processes do not wait for each other here (T4)')
        else:
            getattr(self, name)()

    def all(self):
        self.ask_device()
        self.file = self.file_name()
        self.hold()
        for name, limit, least in self.PARTS:
            if not self.wanted(name):
                continue
            begin = time.time()
            self.part_end = begin + limit
            self.run_part(name, least)
            self.part_end = self.end
            self.parts.append((name, time.time() - begin))
            self.write()

    # ---- in the end

    def stand_in(self):
        return not self.device or 'STAND-IN' in self.device['answer']

    @functools.cache
    def commit(self):
        with contextlib.suppress(OSError):
            with open(self.path('COMMIT')) as f:
                return f.read().strip()
        try:
            r = subprocess.run(['git', '-C', self.options.root, 'describe', '--always', '--dirty', '--abbrev=40'],
                               capture_output=True, text=True, timeout=20)
            return r.stdout.strip() or 'unknown'
        except (OSError, subprocess.TimeoutExpired):
            return 'unknown'

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
                raise Stop('results of a stand-in are not kept among those of GPUs', 2)
            return out
        if self.stand_in():
            return None
        device = re.sub(r'[^a-z0-9]+', '-', self.device['answer'].split(',')[0].lower()).strip('-')
        return os.path.join(results, f'{datetime.date.today()}-{device}.json')

    def write(self):
        """Writes all results known so far, as a complete file that replaces the previous one."""
        if not self.file:
            return
        os.makedirs(os.path.dirname(self.file), exist_ok=True)
        with open(self.file + '.new', 'w') as f:
            json.dump({'device': self.device['answer'], 'stand_in': self.stand_in(), 'ended': self.ended,
                       'date': datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds'),
                       'commit': self.commit(), 'seconds': round(time.time() - self.options.begin, 1),
                       'stuck': self.stuck,
                       'parts': {p: dict(zip(('yes', 'no', 'open', 'out_of_time'), self.counts(p)), seconds=round(s, 1))
                                 for p, s in self.parts},
                       'results': self.results}, f, indent=1)
            f.write('\n')
        os.replace(self.file + '.new', self.file)

    def stop(self):
        """Ends all programs that still run. Ignores a second interruption."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.kill(self.child)
        self.kill(self.holder)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def report(self, ended):
        self.ended = ended
        self.write()
        print(f'written: {self.file}' if self.file else 'not written: what answered is not a GPU', file=sys.stderr)
        self.table(sys.stdout)


def options():
    p = argparse.ArgumentParser(add_help=False)
    p.add_argument('--root', required=True)
    p.add_argument('--build', required=True)
    p.add_argument('--begin', type=float, default=time.time())
    p.add_argument('--seconds', type=float, default=530)
    p.add_argument('--each', type=float, default=1e9)
    p.add_argument('--only')
    p.add_argument('--out')
    p.add_argument('--list', action='store_true')
    p.add_argument('--reaped', type=float, default=REAPED)  # for tests
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
    ended, status = 'by itself', 0
    try:
        runner.all()
    except Stop as stop:
        print(f'tests/gpu/run: {stop}', file=sys.stderr)
        ended, status = str(stop), stop.status
    except KeyboardInterrupt:
        print('tests/gpu/run: interrupted', file=sys.stderr)
        ended, status = 'interrupted', 130
    finally:
        runner.stop()
    if runner.device and status in (0, 130):
        runner.report(ended)
    if os.path.exists(packed):
        shutil.rmtree(o.build, ignore_errors=True)
    return status or int(any(r.get('ok') is False for r in runner.results))


if __name__ == '__main__':
    sys.exit(main())
