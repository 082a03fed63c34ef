"""Functions as values: what makes two of them one, and what does not."""

from __future__ import annotations

import functools
import types

import jax.numpy as jnp
import numpy as np

from jax_kvblock.kernels.functions import Function, by_code

WEIGHT = 2


def helper(x):
    return x + WEIGHT


def same(make, *args):
    one, other = Function(make(*args)), Function(make(*args))
    return one == other and hash(one) == hash(other)


def test_the_same_lambda_made_twice_is_one():
    assert same(lambda: lambda x: x + 1)
    assert same(lambda n: lambda x: x + n, 3)
    assert same(lambda n: functools.partial(lambda x, n: x + n, n=n), 3)


def test_what_is_captured_tells_them_apart():
    def make(n):
        return Function(lambda x: x + n)

    assert make(3) != make(4)
    assert make(2) != make(2.0) and make(1) != make(True)
    assert make(jnp.ones(2)) != make(jnp.ones(2))
    shared = np.ones(2)
    assert make(shared) == make(shared)
    assert Function(lambda x, n=1: x) != Function(lambda x, n=2: x)
    assert Function(functools.partial(helper)) != Function(helper)


def test_code_tells_them_apart():
    assert Function(lambda x: x + 1) != Function(lambda x: x + 2)


def test_functions_of_the_module_count_by_what_they_do(monkeypatch):
    """A notebook's cell that changes the helper changes who calls it."""

    def make():
        return Function(lambda x: helper(x))

    before = make()
    assert before == make()
    monkeypatch.setitem(globals(), "WEIGHT", 3)
    assert before != make()


def test_functions_that_call_themselves():
    def make():
        def down(n):
            return down(n - 1) if n else 0

        return down

    assert same(make)
    assert Function(make())(3) == 0


def test_methods_count_by_their_object():
    class Grid:
        def blocks(self, x):
            return x.size

    one, other = Grid(), Grid()
    assert Function(one.blocks) == Function(one.blocks)
    assert Function(one.blocks) != Function(other.blocks)


def test_modules_with_the_same_text_are_two():
    text = "def f(x):\n    return x + N\n"
    made = []
    for n in (1, 2):
        module = types.ModuleType("made")
        module.N = n
        exec(compile(text, "made.py", "exec"), module.__dict__)
        made.append(Function(module.f))
    assert made[0] != made[1]


def test_what_is_no_function_stays_as_it_is():
    assert by_code(None) is None and by_code((1, 2)) == (1, 2)
    assert by_code(jnp.add) == by_code(jnp.add) and by_code(jnp.add).name == "add"
