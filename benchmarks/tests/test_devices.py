"""The benchmark of buffers over several devices."""

import json

import numpy as np
import pytest

from benchmarks import devices
from jaxbuf.wrappers.sharded.exchange import local_order
from tests.programs.processes import run_processes

PROGRAM = """
HloModule step

ENTRY %main (a: f32[4], b: u32[8]) -> f32[8] {
  %a = f32[4]{0} parameter(0)
  %b = u32[8]{0} parameter(1)
  %both = (f32[8]{0}, bf16[2,3]{1,0}) all-to-all(%a, %b)
  %flags = pred[10]{0} all-gather(%b)
  ROOT %more = f32[8]{0} all-gather(%a)
}
"""


def test_collectives_and_their_bytes():
    found, nbytes = devices.collectives(PROGRAM)
    assert found == {"all-gather": 2, "all-to-all": 1}
    assert nbytes == 8 * 4 + 6 * 2 + 10 + 8 * 4


def test_both_tables():
    command = ("-m", "benchmarks.devices", "--quick", "--devices", 2)
    [printed] = run_processes(command, devices=None)
    lines = printed.splitlines()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    one, *sharded = table[2:11]
    assert one[:2] == ["one ItemBuffer", "1"]
    assert one[4:6] == ["none", "0"]
    assert [row[1] for row in sharded] == ["1"] * 4 + ["2"] * 4
    sent = {}
    for row in sharded:
        # A device alone has nothing to exchange.
        assert ("all-to-all" in row[4]) == (row[1] == "2" and row[2] == "on")
        sent[row[1], row[2]] = int(row[5].replace(",", ""))
        assert float(row[6].replace(",", "")) > 0
    # A batch of 64 rows of 144 bytes, half of which a device receives.
    assert sent["2", "on"] - sent["2", "off"] >= 64 * 144 // 2
    assert [row[0] for row in table[13:]] == ["one after the other", "the next batch ahead"]


COMPILED = """
import json
from benchmarks import scale
for operation, nbytes in %s:
    case = scale.Case(operation, 4, 1024, nbytes)
    print(json.dumps([scale.received(case), *scale.compiled(case)]))
"""
OPERATIONS = [
    ("add", 100),
    ("update_priority", 100),
    ("sample", 100),
    ("sample", 10_000),
    ("sample without exchange", 100),
]


def test_formulas_are_those_of_compiled_programs():
    [printed] = run_processes(("-c", COMPILED % OPERATIONS), devices=4)
    found = [json.loads(line) for line in printed.splitlines()]
    assert len(found) == len(OPERATIONS)
    for (operation, _), (formula, names, nbytes, _) in zip(OPERATIONS, found, strict=True):
        assert formula == nbytes > 0
        assert ("all-to-all" in names) == (operation == "sample")
    # By hand: the sums of four shards, slots and priorities, and keys.
    assert [found[0][0], found[1][0], found[4][0]] == [80, 12 * 1024, 32]


@pytest.mark.parametrize("spread", [0.0, 0.25, 2.0])
def test_only_rows_beyond_the_part_of_a_device_move(spread):
    count, rows, random = 8, 512, np.random.default_rng(1)
    mass = np.exp(spread * random.normal(size=count))
    shard = np.sort(random.choice(count, rows, p=mass / mass.sum())).astype(np.int32)
    goes = shard[np.asarray(local_order(shard, count))]
    beyond = np.maximum(np.bincount(shard, minlength=count) - rows // count, 0).sum()
    assert np.sum(goes != np.arange(rows) // (rows // count)) == beyond
