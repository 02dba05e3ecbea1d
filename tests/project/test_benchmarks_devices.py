"""The benchmark of buffers over several devices."""

from benchmarks import devices
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
