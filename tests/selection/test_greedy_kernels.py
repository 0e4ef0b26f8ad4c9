"""The kernels take the picks that their plain twins take, without a GPU and with one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from raincheck_hf.bench.selectors_agreement import check_cores
from raincheck_hf.kernels import choice
from raincheck_hf.kernels import greedy as plain
from raincheck_hf.selection import greedy

HERE = Path(__file__).parent


def run_program(name: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / name), *arguments],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.strip() == "agrees", done.stderr[-3000:]


@pytest.mark.parametrize(
    "core",
    ["coverage", "max_min", "determinant", "thinning", "column_sums", "similarity", "bad_input"],
)
def test_interpreted_kernels_agree_with_their_twins(core: str) -> None:
    pytest.importorskip("triton")
    run_program("interpreted_kernels.py", core)


def test_interpreted_blocks_agree_on_their_picks() -> None:
    pytest.importorskip("triton")
    run_program("interpreted_blocks.py")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_compiled_kernels_agree_with_their_twins() -> None:
    assert check_cores("cuda") > 100


def test_the_comparison_notices_a_wrong_pick(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_cores("cpu", largest=40) == 60
    right = plain.coverage

    def wrong(*args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        picks, rest = right(*args, **kwargs)  # type: ignore[arg-type]
        return picks.flip(0), rest

    monkeypatch.setattr(greedy, "coverage", wrong)
    with pytest.raises(RuntimeError, match="coverage picks differ from the plain loop's"):
        check_cores("cpu", largest=40)


def test_importing_selection_imports_no_triton_kernel_and_a_cpu_needs_none() -> None:
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"  # as where it is not installed
        "import torch\n"
        "from raincheck_hf.kernels import greedy\n"
        "from raincheck_hf.selection import SelectionContext, select\n"
        "context = SelectionContext(torch.randn(16, 8), [(1, 4, 4)], features=torch.randn(16, 8))\n"
        "print(int(select(context, 'mmtok', 0.5).mask.sum()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "8", done.stderr


def test_gains_are_whole_numbers_that_add_up_in_any_order() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.exp(6 * torch.randn(500, 40, generator=generator))
    scale = plain.quanta(plain.ceiling_of(matrix))
    counts = plain.counted(matrix, scale)
    total = counts.sum(0)
    assert total.max() < 2**41
    order = torch.randperm(500, generator=generator)
    assert torch.equal(counts[order].cumsum(0)[-1], total)
    # The count of a column is within one quantum a row of its sum.
    difference = (total.double() / scale - matrix.double().sum(0)).abs()
    assert difference.max() <= 500 / scale
    picks, _ = plain.coverage(matrix, 20)
    assert torch.equal(plain.coverage(matrix[order], 20)[0], picks)


@pytest.mark.parametrize("ceiling", [1e-30, 3e-7, 0.99, 1.0, 1.5, 4096.0, 1e12])
def test_the_ceiling_bounds_the_count(ceiling: float) -> None:
    scale = plain.quanta(ceiling)
    assert ceiling * scale < 2**41
    assert scale == 2**126 or ceiling * scale >= 2**39


def test_plain_loops_end_with_their_context() -> None:
    assert not choice._loops_only.get()
    with greedy.plain_loops():
        assert choice._loops_only.get()
    with pytest.raises(KeyError), greedy.plain_loops():
        raise KeyError
    assert not choice._loops_only.get()


def test_whole_numbers_keep_residuals_where_fp32_drifts() -> None:
    # The residual after k picks is a Schur complement; 400 of rank 400 leave it at its smallest.
    generator = torch.Generator().manual_seed(0)
    rows = torch.nn.functional.normalize(torch.randn(600, 400, generator=generator), dim=-1)
    matrix = rows @ rows.T
    picks, residual = plain.determinant(matrix, 390)
    exact = matrix.double()
    within = exact[picks][:, picks]
    across = exact[picks]
    schur = exact.diagonal() - (across * torch.linalg.solve(within, across)).sum(0)
    assert (residual.double() - schur).abs().max() < 1e-6


def test_determinants_do_not_depend_on_the_order_of_sums() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(300, 90, generator=generator)  # of different lengths: none is tied
    matrix = rows @ rows.T
    picks, residual = plain.determinant(matrix, 80)
    order = torch.randperm(300, generator=generator)
    permuted = matrix[order][:, order].contiguous()
    found, rest = plain.determinant(permuted, 80)
    assert torch.equal(order[found], picks)
    assert torch.equal(rest, residual[order])


@pytest.mark.parametrize("ceiling", [1e-30, 0.3, 1.0, 2.72, 1e9])
def test_a_residual_is_a_whole_number_that_fp64_holds(ceiling: float) -> None:
    scale = plain.square_quanta(ceiling)
    assert ceiling * scale <= 2**52
    assert scale == 2**126 or ceiling * scale >= 2**51
