"""What importing pm_ops brings in, each in a fresh process: torch alone, and nothing that needs a GPU's software."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
"""


def fresh(code: str, block: tuple[str, ...] = ()) -> str:
    """Run code in a new interpreter in which the named packages cannot be imported; its output."""
    command = [sys.executable, "-c", BLOCK.format(names=block) + code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_pm_ops_imports_and_works_on_cpu_without_triton() -> None:
    code = """
import torch, pm_ops
pool = pm_ops.PagePool(pm_ops.page_major(2, 1, 4, 2, torch.float32), 3)
rows = torch.arange(12.0).view(3, 1, 4)
slots = torch.tensor([5, 0, 2])
pm_ops.store_kv(pool, 1, rows, -rows, slots)
assert torch.equal(pm_ops.load_kv(pool, 1, slots), rows)
table, lens = torch.tensor([[2]]), torch.tensor([2])
pool.copy([2], [1])
out = pm_ops.attention(pool, 1, torch.ones(1, 1, 4), table, lens)
assert out.shape == (1, 1, 4) and out.isfinite().all()
print("worked")
"""
    assert fresh(code, block=("triton",)) == "worked"


def test_importing_pm_ops_loads_neither_wing_nor_engine_nor_compiler() -> None:
    code = """
import sys, pm_ops
heavy = ("pm_ops.adapters", "pm_ops.compile_passes", "pm_ops.kernels", "triton", "transformers", "vllm", "sglang",
         "safetensors", "torch._dynamo", "torch._inductor")
print([name for name in heavy if name in sys.modules])
"""
    assert fresh(code) == "[]"


def test_the_compile_backend_imports_without_triton_and_without_transformers() -> None:
    code = "import pm_ops.compile_passes; print('transformers' in sys.modules, 'pm_ops.adapters' in sys.modules)"
    assert fresh(code, block=("triton", "transformers", "vllm", "sglang")) == "False False"


def test_importing_the_adapters_folder_imports_no_engine() -> None:
    code = "import pm_ops.adapters; print([n for n in ('transformers', 'vllm', 'sglang') if n in sys.modules])"
    assert fresh(code) == "[]"


def test_a_cuda_kernel_without_triton_names_the_extra_to_install() -> None:
    code = """
from pm_ops.ops._common import kernel
try:
    kernel("pages.copy_pages")(None)
except ImportError as error:
    print(error)
"""
    assert "pip install 'pm-ops[triton]'" in fresh(code, block=("triton",))


def test_a_first_call_may_be_compiled() -> None:
    """In a new process, with nothing run eagerly before, fullgraph compilation of the operators works."""
    code = """
import torch, pm_ops
pool = pm_ops.PagePool(pm_ops.page_major(1, 1, 4, 2, torch.float32), 3)
def step(rows, slots):
    pm_ops.store_kv(pool, 0, rows, rows, slots)
    return pm_ops.load_kv(pool, 0, slots)
rows, slots = torch.randn(3, 1, 4), torch.tensor([5, 0, 2])
assert torch.equal(torch.compile(step, fullgraph=True)(rows, slots), rows)
print("compiled")
"""
    assert fresh(code) == "compiled"
