"""The table of devices: every row is whole and says where it is from; a name that is not there is one line."""

from __future__ import annotations

import pytest

from fusion.runtime.job.errors import JobError
from fusion.runtime.placing.device_table import device_row, device_table


def test_every_row_says_where_its_figures_are_from():
    table = device_table()
    assert {"rtx-3080", "rtx-4090", "a100-sxm-80gb", "h100-sxm", "epyc-7763"} <= set(table)
    for row in table.values():
        assert row.source and row.price_source and 2015 <= row.price_year <= 2026
        assert row.peak_flops_per_second("float32") <= row.peak_flops_per_second("fp16")
        assert row.memory is None or row.memory.endswith("GiB")


def test_a_dtype_that_a_device_has_no_units_for_brings_nothing():
    turing, card = device_row("rtx-2080-ti"), device_row("rtx-3080")
    assert turing.peak_flops_per_second("bf16") == turing.peak_flops_per_second()
    assert turing.peak_flops_per_second("fp16") == 53.8e12
    assert card.peak_flops_per_second("bf16") == 59.5e12 and card.peak_flops_per_second() == 29.8e12


@pytest.mark.parametrize(
    ("name", "offered"), [("RTX 3080", "rtx-2080-ti"), ("rtx-9999", "rtx-2080-ti"), ("h100", "h100-pcie")]
)
def test_an_unknown_name_is_one_line_with_those_alike(name, offered):
    with pytest.raises(JobError) as caught:
        device_row(name)
    assert offered in str(caught.value) and "\n" not in str(caught.value)
