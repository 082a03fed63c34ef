"""Functions as values: what makes two of them one, and what does not."""

from __future__ import annotations

import dataclasses
import functools
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest

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
    shared = np.ones(10_000)
    assert make(shared) != make(np.ones(10_000))
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


def test_containers_and_small_arrays_count_by_what_they_hold(monkeypatch):
    def make(held):
        return Function(lambda x: x + held[0])

    for one, other in (
        ((1, 2), (1.0, 2.0)),
        ([1, 2], [1, 3]),
        ({0: 1}, {0: 2}),
        ({1}, {True}),
        (frozenset({1}), frozenset({True})),
        (np.arange(3), np.arange(3.0)),
        (np.arange(3), np.array([0, 1, 3])),
        ((0.0,), (-0.0,)),
        ((np.float32(2),), (np.float64(2),)),
    ):
        assert make(one) == make(type(one)(one)) or isinstance(one, np.ndarray)
        assert make(one) != make(other)
    assert make(np.arange(3)) == make(np.arange(3))
    settings = {"scale": 2}
    before = make(settings)
    settings["scale"] = 10
    assert before != make(settings)


def test_keyword_defaults_and_inner_functions_count():
    def keyword(n):
        def f(x, *, n=n):
            return x + n

        return Function(f)

    def inner(n):
        return Function(lambda x: [WEIGHT * y for y in map(lambda z: z + n, x)])

    assert keyword(1) == keyword(1) != keyword(2)
    assert inner(1) == inner(1) != inner(2)


def test_an_inner_functions_names_count(monkeypatch):
    def make():
        return Function(lambda x: (lambda y: y * WEIGHT)(x))

    before = make()
    monkeypatch.setitem(globals(), "WEIGHT", 9)
    assert before != make()


def test_a_variable_that_changes_later_is_noticed():
    """As in a loop: every function of it would compute with the last value."""
    made = []
    for n in range(3):
        made.append(Function(lambda x: x + n))  # noqa: B023
    assert made[0] != made[2]
    assert made[2](1) == 3
    for _ in range(2):
        with pytest.raises(ValueError, match="uses a variable that has another value"):
            made[0](1)


CALLS = 0
TABLE = None


def counting(x):
    global CALLS, TABLE
    CALLS += 1
    TABLE = TABLE or {"made": 1}
    return x + TABLE["made"]


def test_what_functions_assign_is_state_of_theirs():
    """Of the same function twice, and of a helper's."""
    both = Function(counting), Function(lambda x: counting(x))
    for function in both * 2:
        assert function(1) == 2
    assert Function(counting) == both[0]


def test_names_of_attributes_are_no_variables(monkeypatch):
    one = Function(lambda x: x.size)
    monkeypatch.setitem(globals(), "size", 3)
    assert one(np.ones(4)) == 4


def test_what_is_defined_later():
    def make():
        function = Function(lambda x: later(x))

        def later(x):
            return 2 * x

        return function

    assert make()(3) == 6


def test_defaults_of_one_function_count():
    def make(n):
        def f(x, n=n):
            return x + n

        return Function(f)

    assert make(1) == make(1) != make(2)
    assert Function(functools.partial(make, n=1)) != Function(
        functools.partial(make, n=2)
    )


@dataclasses.dataclass(frozen=True)
class Settings:
    scale: float


def test_what_values_hold_counts():
    def make(held):
        return Function(lambda x: (x, held))

    class Numbers(tuple):
        pass

    assert make(Settings(2)) != make(Settings(2.0)) != make(Settings(3.0))
    assert make(Settings(0.0)) != make(Settings(-0.0))
    assert make(np.ones((2, 3))) != make(np.ones((3, 2)))
    assert make(np.ones(2)) != make(np.ones(2).view(np.matrix))
    assert make(Numbers((1, 2))) == make(Numbers((1, 2)))
    held = np.array([object()], object)
    assert make(held) == make(held) != make(np.array([object()], object))

    def noted(x):
        return x

    before = Function(noted)
    noted.scale = 3
    assert before != Function(noted)


def test_what_a_function_notes_while_it_runs_is_its_own_matter():
    seen, calls = [], 0

    def note(x):
        nonlocal calls
        calls += 1
        seen.append(x)

    noting = Function(note)
    noting(1), noting(2)
    assert seen == [1, 2] and calls == 2


def test_many_functions_of_each_other_take_no_time():
    module = types.ModuleType("made")
    names = [f"f{i}" for i in range(30)]
    text = "".join(
        f"def {name}(x):\n    return [{', '.join(names)}] and x\n" for name in names
    )
    exec(compile(text, "made.py", "exec"), module.__dict__)
    start = time.process_time()
    assert Function(module.f0) == Function(module.f0) != Function(module.f1)
    assert time.process_time() - start < 1


def test_a_function_of_a_function_is_itself():
    once = Function(lambda x: x + 1)
    assert by_code(once) is once


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
