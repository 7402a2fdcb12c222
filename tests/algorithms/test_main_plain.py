"""test_main.py with the defaults of the papers: no option that a file adds to them."""

import pytest
from cases import ALGORITHMS
from test_main import OWN, PLAIN, check_every_update, record

__all__ = ["record"]  # a fixture


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_update_is_the_papers_without_options(record, tmp_path, name):
    check_every_update(record, tmp_path, name, PLAIN | OWN.get(name, [{}, {}])[1])
