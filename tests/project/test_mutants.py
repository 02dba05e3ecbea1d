"""The mutants of the page `tests/mutants.md` can still be made, and their tests are there."""

from tests import mutants


def test_each_text_is_there_once_and_so_is_its_test():
    listed = mutants.read(mutants.PAGE.read_text())
    mutants.check(listed)
    assert len(listed) >= 90
    assert all(one.old != one.new for one in listed)
