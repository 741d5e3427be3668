"""The list of the mutation drill fits the tree."""

import re
from pathlib import Path

import pytest

from scripts.mutants import Fault, read_faults

REPO = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("fault", read_faults(), ids=lambda fault: fault.name)
def test_the_text_of_every_fault_occurs_once_and_its_tests_exist(fault: Fault) -> None:
    fault.planted(REPO)
    assert fault.tests
    for test in fault.tests:
        file, _, function = test.partition("::")
        assert re.search(rf"^def {function.partition('[')[0]}", (REPO / file).read_text(), re.MULTILINE), test
