#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""predict.py parses machine code, and kernels/cuda/PREDICTED.txt describes the existing kernels."""
import argparse
import io
import sys
import time

sys.dont_write_bytecode = True
import predict
import run

SASS = """
.text.kvd_sample:
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/                   LDG.E R1, desc[UR4][R2.64] ;
.L_x_1:
        /*0020*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0030*/                   LDG.E.128.CONSTANT R8, desc[UR4][R2.64+0x10] ;
        /*0040*/                   FADD R4, R4, R8 ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0060*/                   LDG.E.U16 R4, desc[UR4][R2.64] ;
        /*0070*/              @!P1 BRA `(.L_x_2) ;
        /*0080*/                   EXIT ;
.L_x_3:
        /*0090*/                   BRA `(.L_x_3);
"""


def test_the_loop_that_reads():
    (name, code, labels), = predict.functions(SASS)
    assert name == 'sample' and len(code) == 10, (name, len(code))
    loop = predict.main_loop(code, labels, False)
    assert [op for op, _ in loop] == ['LDG.E.128.CONSTANT'] * 2 + ['FADD', 'BRA'], loop
    row = predict.predict(code, labels, {'threads': 256}, 64, 0)
    assert (row['warps'], row['flight'], row['read']) == (32, 1024 * 32, 32), row
    assert abs(row['per_byte'] - 4 / (32 * 32)) < 1e-9, row


STAGED = """
.text.kvd_staged:
.L_x_1:
        /*0000*/                   LDGSTS.E.BYPASS.128.ZFILL [R1], desc[UR4][R2.64] ;
.L_x_2:
        /*0010*/                   LDGSTS.E.BYPASS.128.ZFILL [R1], desc[UR4][R4.64] ;
        /*0020*/               @P1 BRA `(.L_x_2) ;
.L_x_3:
        /*0030*/                   LDS.128 R4, [R1] ;
        /*0040*/               @P2 BRA `(.L_x_3) ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
"""


def test_what_is_rare_is_not_counted():
    (_, code, labels), = predict.functions(STAGED)
    loop = predict.main_loop(code, labels, True)
    assert [op.split('.')[0] for op, _ in loop] == ['LDGSTS', 'LDS', 'BRA', 'BRA'], loop


BRANCHES = """
.text.kvd_branches:
.L_x_1:
        /*0000*/                   ISETP.GE.AND P0, PT, R0, R1, PT ;
        /*0010*/              @!P0 BRA `(.L_x_2) ;
        /*0020*/                   LDG.E.U16 R4, desc[UR4][R2.64] ;
        /*0030*/                   LDG.E.U16 R5, desc[UR4][R2.64] ;
        /*0040*/                   LDG.E.U16 R6, desc[UR4][R2.64] ;
        /*0050*/                   BRA `(.L_x_3) ;
.L_x_2:
        /*0060*/                   LD.E.128 R4, desc[UR4][R2.64] ;
        /*0070*/               @P1 LDG.E.128 R8, desc[UR4][R2.64] ;
.L_x_3:
        /*0080*/                   FADD R4, R4, R8 ;
        /*0090*/               @P2 BRA `(.L_x_1) ;
"""


def test_the_way_that_is_usual():
    (_, code, labels), = predict.functions(BRANCHES)
    assert predict.usual_way(code, labels) == (32, 6), predict.usual_way(code, labels)
    row = predict.predict(code, labels, {'threads': 256, 'usual': True}, 32, 0)
    assert (row['read'], row['instructions']) == (32, 6), row


def test_what_is_resident():
    assert predict.resident(32, 0, 256) == 8            # threads
    assert predict.resident(137, 104192, 128) == 2      # shared memory
    assert predict.resident(255, 0, 256) == 1           # registers


def test_the_table_is_of_these_kernels():
    table = predict.table()
    assert list(table) == [name for _, name, _, _ in predict.KERNELS], list(table)
    for image, name, launch, _ in predict.KERNELS:
        warps = predict.warps_of(image, name, launch)
        assert table[name]['warps'] == warps, f'{name}: {warps} warps by RESOURCES.txt: rebuild PREDICTED.txt (predict.py)'
    assert set(predict.BENCHES.values()) <= set(table)


def test_a_run_confirms_or_refutes():
    o = argparse.Namespace(root='.', build='.', begin=time.time(), seconds=100, only=None, out=None, reaped=1, each=1e9)
    runner, sys.stdout = run.Runner(o), io.StringIO()
    runner.device = {'answer': 'NVIDIA H100 80GB HBM3, CUDA 13.0'}
    expected = predict.table()['memshare_norms']['H100']
    for share in (expected - 0.05, expected - 0.4):
        runner.results = [{'part': 'benchmarks', 'question': 'MemShare norms of blocks', 'numbers': {'share': share}}]
        runner.confirm()
        assert runner.results[-1]['ok'] is (share > expected - 0.1), runner.results[-1]
    runner.stop()
    sys.stdout = sys.__stdout__


for name, test in list(globals().items()):
    if name.startswith('test_'):
        test()
        print('ok   ', name)
