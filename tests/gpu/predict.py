#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Predicts from machine code what the kernels for sm_90 should reach on an H100 and an H200. The first run of
tests/gpu/run confirms or refutes it.

    predict.py [--nvcc NVCC] [--nvdisasm NVDISASM] > kernels/cuda/PREDICTED.txt

nvdisasm is in CUDA's toolkit, and in the package nvidia-cuda-nvdisasm of PyPI. Exit status 77: one of the two is missing.

One loop of each kernel counts (main_loop): its instructions, the bytes that a thread reads from global memory in one
iteration, and so the instructions of a warp per byte. An inner loop counts once. If a kernel branches in that loop for
rare cases (numbers at unaligned addresses, a row that continues in another block), the path with the widest loads
counts (usual_way). A multiprocessor has in flight the bytes that its threads read in one iteration or, for kernels that
copy ahead to shared memory, all stages except the one in use. Then, as a share of the memory's bandwidth,

    in flight     bytes in flight / (bandwidth of a multiprocessor x 900 ns, the latency under load), 0.94 at most
    issue         4 instructions per clock x 0.6 / (instructions per byte x bytes that arrive per clock)

and the smaller of the two is the prediction.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

LATENCY, BEST, ISSUE = 900e-9, 0.94, 4 * 0.6
DEVICES = {'H100': (3.35e12, 132, 1.755e9), 'H200': (4.8e12, 132, 1.755e9)}  # bytes/s, multiprocessors, clock
REGISTERS, THREADS, BLOCKS, SHARED = 65536, 2048, 32, 227 << 10  # per multiprocessor


def stages(dim):  # attend_launch.h
    return 6 if dim <= 64 else 3


def decode(dim, heads):
    """Four warps, each with its tiles and queries, as in attend.c."""
    return {'threads': 128, 'shared': 4 * stages(dim) * 16 * (dim * 4 + 8) + 16 * dim * 2, 'stages': stages(dim)}


# image, kernel; threads per block, dynamic shared memory and stages in it; the aim of tests/gpu/bench*.c. Kernels whose
# loops have different numbers of iterations, as summarise has, are left out.
KERNELS = [
    *(('attend_decode', f'attend_bf16_{dim}_{heads}', decode(dim, heads), 0.8 if (dim, heads) == (128, 8) else None)
      for dim in (64, 128, 256) for heads in (8, 16)),
    ('attend_any', 'attend_any_128', {'threads': 128}, None),
    ('keydiff', 'keydiff_parts', {'threads': 256}, 0.8),
    ('keydiff', 'keydiff_score', {'threads': 256}, 0.8),
    ('keydiff', 'keydiff_blocks', {'threads': 256}, None),
    ('memshare', 'memshare_plain', {'threads': 256}, 0.8),
    ('memshare', 'memshare_rows', {'threads': 256}, None),
    ('memshare', 'memshare_norms', {'threads': 256}, None),
    ('bicache', 'products', {'threads': 256, 'usual': True}, None),
    ('hshare', 'overlap', {'threads': 256, 'usual': True}, None),
    ('block', 'compact', {'threads': 256, 'usual': True}, None),
]

# the beginning of the question under which tests/gpu/bench*.c measures a kernel
BENCHES = {'paged decode attention, 64': 'attend_bf16_128_8', 'KeyDiff anchor alone': 'keydiff_parts',
           'KeyDiff score alone': 'keydiff_score', 'MemShare distances of 10,000': 'memshare_plain',
           'MemShare norms': 'memshare_norms'}
NEAR = 0.1  # largest difference that confirms a prediction


# ---- machine code

INSTRUCTION = re.compile(r'/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);')
LABEL = re.compile(r'^(\.L_x_\d+):')


def functions(text):
    """The name of each kernel, its instructions (operation, predicate and operands), and its labels as indices."""
    name, code, labels = None, [], {}
    for line in text.splitlines():
        begin = re.match(r'^\.text\.kvd_(\w+):', line)
        if begin:
            if name:
                yield name, code, labels
            name, code, labels = begin.group(1), [], {}
            continue
        label, instruction = LABEL.match(line), INSTRUCTION.search(line)
        if label:
            labels[label.group(1)] = len(code)
        elif instruction:
            predicate, operation, operands = instruction.groups()
            code.append((operation, (predicate or '') + operands))
    if name:
        yield name, code, labels


def read_bytes(operation):
    """Bytes that a thread reads from global memory with this instruction."""
    words = operation.split('.')
    if words[0] not in ('LDG', 'LDGSTS'):
        return 0
    for width in ('128', '64'):
        if width in words:
            return int(width) // 8
    return 1 if {'U8', 'S8'} & set(words) else 2 if {'U16', 'S16'} & set(words) else 4


def width(operation):
    """Bytes of a load, including generic loads."""
    return read_bytes('LDG' + operation[2:]) if re.match(r'LD\.', operation) else read_bytes(operation)


def loops(code, labels):
    """The first and last instruction of each loop."""
    for at, (operation, operands) in enumerate(code):
        target = re.search(r'\.L_x_\d+', operands)
        if operation.startswith('BRA') and target and labels.get(target.group(), at + 1) <= at:
            yield labels[target.group()], at


def main_loop(code, labels, staged):
    """The loop that counts. If copies run ahead (staged), it is the loop that reads most, without inner loops that read,
    which are for unaligned rows and rotated queries. Otherwise there is a loop per type of numbers: the innermost one
    with the most instructions per byte, of those that read at least half as much as any."""
    reading = [(a, b, n) for a, b in loops(code, labels) if (n := sum(read_bytes(op) for op, _ in code[a:b + 1]))]
    inner = [(a, b, n) for a, b, n in reading
             if staged or not any((c, d) != (a, b) and a <= c and d <= b for c, d, _ in reading)]
    if not inner:
        return code
    most = max(n for _, _, n in inner)
    a, b, _ = max(inner, key=lambda loop: (loop[2] if staged else (loop[1] - loop[0]) / loop[2]) * (loop[2] * 2 >= most))
    rare = {i for c, d, _ in reading if staged and a <= c and d <= b and (c, d) != (a, b) and
            not any((e, f) != (c, d) and c <= e and f <= d for e, f, _ in reading) for i in range(c, d + 1)}
    return [code[i] for i in range(a, b + 1) if i not in rare]


def next_of(code, labels, at):
    operation, operands = code[at]
    target = re.search(r'\.L_x_\d+', operands)
    if not operation.startswith('BRA') or not target:
        return [at + 1]
    return [labels.get(target.group(), at + 1)] + ([at + 1] if operands.startswith('@') else [])


def usual_way(code, labels):
    """Bytes and instructions of one iteration of an innermost loop, on the path with the most of the widest loads and
    the fewest instructions. There is a loop per type of numbers: the one with the widest loads that reads most."""
    best = (0, 0, 0)
    for a, b in loops(code, labels):
        if any((c, d) != (a, b) and a <= c and d <= b for c, d in loops(code, labels)):
            continue
        widest = max(map(width, (op for op, _ in code[a:b + 1])), default=0)
        ways = {b: (0, 1)}  # from each instruction to the end: bytes, instructions
        for at in range(b - 1, a - 1, -1):
            behind = [ways[to] for to in next_of(code, labels, at) if at < to <= b and to in ways]
            if behind:
                read, n = max(behind, key=lambda way: (way[0], -way[1]))
                ways[at] = (read + widest * (width(code[at][0]) == widest), n + 1)
        best = max(best, (widest, *ways.get(a, (0, 0))))
    return best[1:]


# ---- what follows

def registers_of(image):
    """Registers and static shared memory of sm_90, from RESOURCES.txt."""
    result = {}
    with open(os.path.join(ROOT, 'kernels/cuda/RESOURCES.txt')) as f:
        for line in f:
            words = line.split()
            if len(words) > 7 and words[0] == image and words[1].startswith('kvd_'):
                result[words[1][4:]] = int(words[5]), int(words[-1])
    return result


def resident(registers, shared, threads):
    """Blocks that a multiprocessor runs at a time."""
    warps = threads // 32
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32) // warps
    return min(BLOCKS, THREADS // threads, by_registers, SHARED // (shared + 1024))


def predict(code, labels, launch, registers, static):
    threads, shared = launch['threads'], launch.get('shared', 0)
    blocks = resident(registers, shared + static, threads)
    if launch.get('usual'):
        read, instructions = usual_way(code, labels)
    else:
        loop = main_loop(code, labels, 'stages' in launch)
        read, instructions = sum(read_bytes(op) for op, _ in loop), len(loop)
    ahead = shared * (launch['stages'] - 1) // launch['stages'] if 'stages' in launch else threads * read
    row = {'warps': blocks * threads // 32, 'flight': blocks * ahead, 'instructions': instructions, 'read': read}
    row['per_byte'] = row['instructions'] / (32 * row['read']) if row['read'] else float('inf')
    for device, (rate, processors, clock) in DEVICES.items():
        flight = min(BEST, row['flight'] / (rate / processors * LATENCY))
        issue = ISSUE / (row['per_byte'] * rate / processors / clock)
        row[device] = min(flight, issue)
        row['by ' + device] = 'flight' if flight <= issue else 'issue'
    return row


def warps_of(image, name, launch):
    """Warps per multiprocessor, as in the table."""
    registers, static = registers_of(image)[name]
    return resident(registers, launch.get('shared', 0) + static, launch['threads']) * launch['threads'] // 32


def table():
    """The committed table: {kernel: {'warps': per multiprocessor, device: share of its bandwidth}}."""
    with open(os.path.join(ROOT, 'kernels/cuda/PREDICTED.txt')) as f:
        rows = [line.split() for line in f if not line.startswith(('#', 'kernel '))]
    return {row[0]: {'warps': int(row[1]), 'H100': float(row[7]), 'H200': float(row[10])} for row in rows}


def disassemble(nvcc, nvdisasm, image, folder):
    cubin = os.path.join(folder, image + '.cubin')
    subprocess.run([nvcc, '-cubin', '-arch=sm_90', '-O3', '-std=c++17', '-fmad=false', '-I', ROOT, '-o', cubin,
                    os.path.join(ROOT, 'kernels/cuda', image + '.cu')], check=True, capture_output=True)
    text = subprocess.run([nvdisasm, '-c', cubin], check=True, capture_output=True, text=True).stdout
    return {name: (code, labels) for name, code, labels in functions(text)}


def verdict(row, device, aim):
    return f'{row[device]:5.2f} {row["by " + device]:<6}' + \
           (f' {"reached" if row[device] >= aim else "missed":<7}' if aim else f' {"-":<7}')


def report(tools):
    print('# What the kernels should reach on sm_90, from their machine code (tests/gpu/predict.py says how): a prediction.')
    print('# No GPU has run them. in flight: bytes of a multiprocessor; per byte: instructions of a warp; then the share of')
    print('# the bandwidth, what bounds it, and whether the aim of tests/gpu/bench*.c would be reached.')
    print('# Decode attention copies by cp.async, 16 bytes an instruction, and not by cp.async.bulk, one for a block: by this table')
    print('# that would change the rows that issue bounds, which have 64 dimensions, and no other. An mbarrier that is waited for')
    print('# wrongly is a kernel that never ends, and only a GPU would show it. It is the first thing to try there if the row of 128')
    print('# dimensions and 8 heads measures less than predicted, and its share of issue slots is the reason (ncu).')
    print('# Prefill is bound by arithmetic, and not in this table. It uses mma, not wgmma, which reckons a third to a fifth of what')
    print('# FlashAttention 3 reaches: engines bring such a kernel, and it reads blocks where they lie. Ours is for kvlm.')
    print(f'{"kernel":<22} {"warps":>5} {"in flight":>9} {"instructions":>12} {"bytes":>5} {"per byte":>8} {"aim":>4}  '
          f'{"H100":<20} {"H200":<20}'.rstrip())
    images, folder = {}, tempfile.mkdtemp()
    try:
        for image, name, launch, aim in KERNELS:
            if image not in images:
                images[image] = disassemble(*tools, image, folder)
            row = predict(*images[image][name], launch, *registers_of(image)[name])
            print(f'{name:<22} {row["warps"]:>5} {row["flight"]:>9} {row["instructions"]:>12} {row["read"]:>5} '
                  f'{row["per_byte"]:>8.3f} {aim or "-":>4}  {verdict(row, "H100", aim)} {verdict(row, "H200", aim)}'.rstrip())
    finally:
        shutil.rmtree(folder)


def main():
    p = argparse.ArgumentParser()
    p.add_argument('--nvcc', default='nvcc')
    p.add_argument('--nvdisasm', default='nvdisasm')
    o = p.parse_args()
    for tool in (o.nvcc, o.nvdisasm):
        if not shutil.which(tool):
            print(f'predict.py: {tool} is not here', file=sys.stderr)
            return 77
    report((o.nvcc, o.nvdisasm))
    return 0


if __name__ == '__main__':
    sys.exit(main())
