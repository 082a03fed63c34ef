"""Kernels as values: CUDA C++, PTX, machine code, and what lies beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from emulated_kernels import SOURCE

from jax_kvblock import kernels
from jax_kvblock.kernels import nvrtc


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_KVBLOCK_CACHE_DIR", str(tmp_path / "cache"))


def test_a_kernel_from_a_file_and_from_text(tmp_path):
    path = tmp_path / "mine.cu"
    path.write_text(SOURCE)
    from_file = kernels.from_cuda(path, "scale")
    assert [p.name for p in from_file.parameters] == ["x", "y", "a", "n"]
    assert repr(from_file) == "Kernel('scale of mine.cu')"
    from_text = kernels.from_cuda(SOURCE, "scale")
    assert from_text.name == "scale"
    assert [p.name for p in from_text.parameters] == ["x", "y", "a", "n"]


def test_a_template():
    source = "template <int N, typename T> __global__ void f(T* x, T v) { x[N] = v; }"
    kernel = kernels.from_cuda(source, "f<3, double>")
    assert kernel.name.startswith("_Z1fILi3EdE")
    assert [(p.type, p.name) for p in kernel.parameters] == [("u64", "x"), ("f64", "v")]


def test_kernels_of_the_same_code_are_equal():
    one, two = (kernels.from_cuda(SOURCE, "scale") for _ in range(2))
    assert one == two and hash(one) == hash(two)
    assert one != kernels.from_cuda(SOURCE, "shift")
    assert one != kernels.from_cuda(SOURCE.replace("a * x[i]", "x[i] / a"), "scale")


def test_options_and_include_paths(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "more.h").write_text("#define VALUE WIDTH\n")
    (tmp_path / "one.h").write_text('#include "deep/more.h"\n')
    source = '#include "one.h"\nextern "C" __global__ void f(int* x) { *x = VALUE; }\n'

    def made(width: int) -> kernels.Kernel:
        return kernels.from_cuda(
            source, "f", options=[f"-DWIDTH={width}"], include_paths=[tmp_path]
        )

    assert b", 41;" in made(41).image
    assert b", 42;" in made(42).image
    # What is included is a part of the key.
    (tmp_path / "deep" / "more.h").write_text("#define VALUE (WIDTH + 100)\n")
    assert b", 142;" in made(42).image


def test_arch():
    assert b".target sm_90a" in kernels.from_cuda(SOURCE, "scale", arch="90a").image
    if nvrtc.default_arch() == "80":
        assert b".target sm_80" in kernels.from_cuda(SOURCE, "scale").image


def test_default_arch(monkeypatch):
    for capabilities, arch in (
        ((), "80"),
        (((9, 0),), "90a"),
        (((8, 6),), "86"),
        (((8, 0), (9, 0)), "80"),
        (((10, 0),), "100a"),
    ):
        monkeypatch.setattr(
            nvrtc.ffi, "gpu_capabilities", lambda c=capabilities: frozenset(c)
        )
        assert nvrtc.default_arch() == arch


def test_errors_have_the_sources_lines(tmp_path):
    path = tmp_path / "wrong.cu"
    path.write_text("\n\n__global__ void f(int* x) {\n  *x = oops;\n}\n")
    with pytest.raises(ValueError, match=r"from_cuda: wrong.cu does not compile") as e:
        kernels.from_cuda(path, "f")
    assert "wrong.cu(4): error" in str(e.value) and "oops" in str(e.value)
    with pytest.raises(ValueError, match="does not compile"):
        kernels.from_cuda("__global__ void f() {}", "g")


def test_what_was_compiled_is_kept(tmp_path, monkeypatch):
    made = kernels.from_cuda(SOURCE, "scale")
    (kept,) = (tmp_path / "cache").iterdir()
    monkeypatch.setattr(nvrtc, "_compile", None)  # nobody compiles any more
    took = []
    for _ in range(5):
        begin = time.perf_counter()
        assert kernels.from_cuda(SOURCE, "scale") == made
        took.append(time.perf_counter() - begin)
    assert sorted(took)[2] < 0.02  # 1 ms where nobody else is on the machine
    with pytest.raises(TypeError):  # other options are another key
        kernels.from_cuda(SOURCE, "scale", options=["-DX"])
    with pytest.raises(TypeError):
        kernels.from_cuda(SOURCE, "scale", cache=False)
    kept.write_text(kept.read_text()[:100])  # half a file is none
    with pytest.raises(TypeError):
        kernels.from_cuda(SOURCE, "scale")


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAX_KVBLOCK_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert kernels.from_cuda(SOURCE, "scale").name == "scale"


def test_without_nvrtc_a_message_says_what_brings_it():
    code = (
        "import sys; sys.modules['cuda.bindings'] = None\n"
        "from jax_kvblock import kernels\n"
        "kernels.from_cuda('__global__ void f() {}', 'f', cache=False)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode != 0
    assert "pip install 'jax_kvblock[kernels]'" in done.stderr


# ---- PTX and what lies beside it -----------------------------------------------------


@pytest.fixture
def ptx(tmp_path):
    path = tmp_path / "vector.ptx"
    path.write_bytes(kernels.from_cuda(SOURCE, "scale").image)
    return path


def test_ptx_with_a_sidecar(ptx):
    ptx.with_suffix(".json").write_text(
        json.dumps(
            {
                "entryPoint": "scale",
                "blockSize": 128,
                "sharedMemory": 1024,
                "parameters": [{"name": "X"}, {"name": "Y"}, "A", "N"],
                "description": "not read",
            }
        )
    )
    kernel = kernels.from_ptx(ptx)
    assert kernel.name == "scale"
    assert kernel.block == (128, 1, 1)
    assert kernel.shared_memory == 1024
    assert [p.name for p in kernel.parameters] == ["X", "Y", "A", "N"]
    other = kernels.from_ptx(
        ptx, sidecar={"entry_point": "shift", "block_size": [8, 4]}
    )
    assert (other.name, other.block) == ("shift", (8, 4, 1))


def test_ptx_without_one(ptx):
    kernel = kernels.from_ptx(str(ptx), "scale")
    assert [p.type for p in kernel.parameters] == ["u64", "u64", "f32", "u32"]
    assert kernels.from_ptx(ptx.read_text(), "shift").name == "shift"
    with pytest.raises(ValueError, match=r"several kernels: it has .*'scale'.*entry="):
        kernels.from_ptx(ptx)
    with pytest.raises(ValueError, match=r"has no kernel 'skale': it has 'scale'"):
        kernels.from_ptx(ptx, "skale")


def test_a_module_with_one_kernel_needs_no_name():
    only = kernels.from_cuda("__global__ void f(int* x) { *x = 1; }", "f")
    assert kernels.from_ptx(only.image).name == only.name


FIXED = """
.version 8.0
.target sm_80
.address_size 64
.entry f(.param .u64 f_param_0)
.reqntid 64, 2
{ ret; }
"""


def test_a_block_that_the_ptx_demands():
    made = kernels.from_ptx(FIXED)
    assert made.block == (64, 2, 1) and made.block_is_fixed
    assert kernels.from_ptx(FIXED, sidecar={"blockSize": [64, 2]}) == made
    with pytest.raises(ValueError, match=r"\(128, 1, 1\).*demands \(64, 2, 1\)"):
        kernels.from_ptx(FIXED, sidecar={"blockSize": 128})
    source = "__global__ void __block_size__((64, 2, 1)) f(float* x) { *x = 1; }"
    compiled = kernels.from_cuda(source, "f", arch="90")
    assert compiled.block == (64, 2, 1) and compiled.block_is_fixed
    assert not kernels.from_cuda(SOURCE, "scale").block_is_fixed


def test_what_is_no_ptx(tmp_path):
    with pytest.raises(ValueError, match="source must be PTX text"):
        kernels.from_ptx("int main() {}\n")
    with pytest.raises(ValueError, match="4 parameters, and 1 name came"):
        text = kernels.from_cuda(SOURCE, "scale").image
        kernels.from_ptx(text, "scale", parameters=["x"])
    with pytest.raises(ValueError, match="the sidecar is no JSON"):
        kernels.from_ptx(text, "scale", sidecar="{ nothing\n")


@pytest.mark.parametrize(
    ("sidecar", "says"),
    [
        (
            {"blockSize": "256"},
            "sidecar's blockSize must be one to three integers .* got '256'",
        ),
        ({"blockSize": 256.5}, "sidecar's blockSize must be one to three integers"),
        (
            {"blockSize": [1, 2, 3, 4]},
            "sidecar's blockSize must be one to three integers",
        ),
        ({"blockSize": 0}, "sidecar's blockSize .* of at least 1, got 0"),
        ({"sharedMemory": "1 KiB"}, "sidecar's sharedMemory must be an integer"),
        ({"sharedMemory": -1}, "sidecar's sharedMemory must be at least 0, got -1"),
        ({"parameters": 3}, "sidecar's parameters must be names, .* got 3"),
        ({"parameters": "x"}, "sidecar's parameters must be names, .* got 'x'"),
        (
            {"parameters": [{"type": "int"}]},
            "sidecar's parameters .* or objects with a name, got",
        ),
    ],
)
def test_sidecars_that_say_something_else(sidecar, says):
    with pytest.raises((TypeError, ValueError), match=f"^from_ptx: the {says}"):
        kernels.from_ptx(FIXED, sidecar=sidecar)


@pytest.mark.parametrize("given", [3, None, ""])
def test_sources_that_are_none(given):
    for make in (kernels.from_ptx, kernels.from_cubin):
        with pytest.raises(TypeError, match="source must be text, bytes or a file's"):
            make(given, "f")


def test_ptx_without_kernels():
    with pytest.raises(ValueError, match=r"the PTX has no kernel \(.entry\)"):
        kernels.from_ptx(".version 8.0\n.target sm_80\n")
    with pytest.raises(TypeError, match="parameters must be names, got one, 'x'"):
        kernels.from_ptx(FIXED, parameters="x")


def test_cubin(tmp_path):
    image = b"\x7fELF" + bytes(60)
    kernel = kernels.from_cubin(image, "f")
    assert not kernel.is_ptx and kernel.parameters is None
    path = tmp_path / "k.cubin"
    path.write_bytes(image)
    (tmp_path / "k.json").write_text('{"entryPoint": "g", "blockSize": [32, 2, 2]}')
    assert kernels.from_cubin(path).name == "g"
    assert kernels.from_cubin(path).block == (32, 2, 2)
    with pytest.raises(ValueError, match="nothing names the kernel"):
        kernels.from_cubin(image)
    with pytest.raises(ValueError, match="from_ptx takes PTX"):
        kernels.from_cubin(b".version 8.0", "f")


@pytest.mark.parametrize(
    ("declared", "names"),
    [
        ("__global__ void f()", []),
        ("__global__ void f(int a, const float *__restrict__ x)", ["a", "x"]),
        ("template <class T> __global__ void\n__launch_bounds__(64) f(T* x)", ["x"]),
        ("__global__ void f(Pair<int, 4> p, float (&q)[4])", None),
        ("__global__ void f(int)", None),
        ("__global__ void f(int a /* of b */, // and c\n float d)", ["a", "d"]),
        ("__global__ void g(int a)", None),
    ],
)
def test_names_are_read_off_the_source(declared, names):
    from jax_kvblock.kernels.kernel import declared_names

    assert declared_names(declared + " {}", "f") == names
