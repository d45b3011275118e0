import subprocess
import sys

import pytest

CODE = (
    "import sys; import {}; "
    "print(*[m for m in ('torch', 'jax', 'matplotlib.pyplot') if m in sys.modules])"
)


@pytest.mark.parametrize(
    "module",
    ["contadj", "contadj.cli", "contadj.convergence", "contadj.plotting", "contadj.results"],
)
def test_importing_the_core_loads_neither_framework_nor_pyplot(module):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CODE.format(module)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
