"""`BlockManager.update`: what it passes on, caches and forgets; pools that are lost."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from managers import add

import jax_kvblock as kv

NL, NT, NH, HD = 2, 4, 2, 5
BLOCKS = 4


def make_manager(**changes: Any) -> kv.BlockManager:
    arguments = {"num_kv_heads": NH, "head_dim": HD, "dtype": jnp.float32, **changes}
    return kv.BlockManager(NL, NT, num_blocks=BLOCKS, **arguments)


@pytest.fixture
def manager() -> kv.BlockManager:
    return make_manager()


def all_are(manager: kv.BlockManager, number: float) -> bool:
    return all((np.asarray(x) == number).all() for x in manager.pool.arrays)


# ---- arguments -----------------------------------------------------------------------


def test_update_passes_keywords_on(manager: kv.BlockManager) -> None:
    assert manager.update(add, number=3) is None
    assert all_are(manager, 3)

    def step(pool: kv.KVPool, *, step: Any, self: Any, where: Any) -> Any:
        return add(pool, step), {"self": self, "where": where}

    result = manager.update(step, step=1, self=2, where={"a": (3, 4.0)})
    assert result == {"self": 2, "where": {"a": (3, 4.0)}}
    assert all_are(manager, 4)

    def step_of_data(pool: kv.KVPool, data: Any, run: Any = 0) -> kv.KVPool:
        return add(pool, data + run)

    manager.update(step_of_data, data=2, run=1)
    assert all_are(manager, 7)


@pytest.mark.parametrize("names", ["kind", ["kind"], ("kind", "times")])
def test_update_takes_static_arguments(manager: kv.BlockManager, names: Any) -> None:
    traces: list[tuple[Any, Any]] = []

    def step(pool: kv.KVPool, number: Any, kind: str, times: int = 1) -> kv.KVPool:
        traces.append((kind, number))
        return add(pool, number * times) if kind == "add" else pool

    for number in range(3):
        manager.update(step, number, "add", static_argnames=names)
        manager.update(step, number, kind="add", static_argnames=names)
        manager.update(step, number, kind="keep", static_argnames=names)
    assert all_are(manager, 6)
    assert [kind for kind, _ in traces] == ["add", "add", "keep"]
    assert all(isinstance(number, jax.core.Tracer) for _, number in traces)


def test_update_resolves_static_arguments_of_methods(manager: kv.BlockManager) -> None:
    class Engine:
        def step(self, pool: kv.KVPool, kind: str) -> kv.KVPool:
            return add(pool, {"one": 1}[kind])

    manager.update(Engine().step, "one", static_argnames="kind")
    assert all_are(manager, 1)


@pytest.mark.parametrize("names", [3, [0], None])
def test_static_names_must_be_names(manager: kv.BlockManager, names: Any) -> None:
    with pytest.raises(TypeError, match=r"update: static_argnames must be .*, got"):
        manager.update(add, static_argnames=names)
    assert all_are(manager, 0)


def test_a_step_cannot_take_the_keyword_of_update(manager: kv.BlockManager) -> None:
    def step(pool: kv.KVPool, static_argnames: Any) -> kv.KVPool:
        return add(pool, static_argnames)

    with pytest.raises(TypeError, match=r"update: step must not have.*rename it"):
        manager.update(step, 3)


def test_a_step_must_be_a_function(manager: kv.BlockManager) -> None:
    with pytest.raises(TypeError, match=r"update: step must be a function.*got 3; its"):
        manager.update(3, add)  # type: ignore[arg-type]
    assert all_are(manager, 0)


def test_updates_work_without_jit(manager: kv.BlockManager) -> None:
    old = manager.pool
    with jax.disable_jit():
        assert manager.update(lambda pool: (add(pool), {"a": 3})) == {"a": 3}
    assert all_are(manager, 1) and not old.data.is_deleted()


def test_without_jit_a_step_may_return_arrays_of_numpy(
    manager: kv.BlockManager,
) -> None:
    for _ in range(2):  # the pool is one that JAX knows, for the next step
        with jax.disable_jit():
            manager.update(lambda pool: jax.tree.map(np.asarray, add(pool)))
    assert isinstance(manager.pool.data, jax.Array) and all_are(manager, 2)


def test_a_list_of_blocks_stands_for_its_ids(
    manager: kv.BlockManager, rng: np.random.Generator
) -> None:
    a, b = manager.allocate_blocks(2), manager.allocate_blocks(2)
    values = rng.normal(size=(2, *a[0].shape)).astype(np.float32)
    manager.update(kv.scatter_blocks, a, values, layout="NHD", static_argnames="layout")
    manager.update(kv.copy_blocks, src_ids=a, dst_ids=b)
    np.testing.assert_array_equal([np.asarray(block) for block in b], values)


def test_lists_of_blocks_may_lie_deep_in_an_argument(manager: kv.BlockManager) -> None:
    a, b = manager.allocate_blocks(1), manager.allocate_blocks(2)

    def step(pool: kv.KVPool, tree: Any, *, kind: Any, **more: Any) -> Any:
        assert kind is a, "static arguments come as they are"
        return pool, (tree, more)

    tree = {"ids": a, "both": (a, [b, None, 3])}
    tree, more = manager.update(step, tree, kind=a, deep=[b], static_argnames="kind")
    assert tree["ids"].tolist() == tree["both"][0].tolist() == a.ids.tolist()
    assert tree["both"][1][0].tolist() == more["deep"][0].tolist() == b.ids.tolist()
    with jax.transfer_guard("disallow"):
        manager.update(step, {"ids": b}, kind=a, static_argnames="kind")


class Pair:
    """A pytree whose Python code runs when results are put together."""

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


jax.tree_util.register_pytree_node(
    Pair, lambda pair: ((pair.a, pair.b), None), lambda _, children: Pair(*children)
)


class Two(NamedTuple):
    a: Any
    b: Any


@pytest.mark.parametrize("node", [dict, list, tuple, Two, OrderedDict, "Pair"])
def test_lists_of_blocks_may_lie_in_any_node(
    manager: kv.BlockManager, node: Any
) -> None:
    (a,) = blocks = manager.allocate_blocks(1)
    weights = [jnp.ones(3), np.ones(2)]
    if node == "Pair":
        argument: Any = Pair(weights, blocks)
    elif node is Two:
        argument = Two(weights, blocks)
    elif issubclass(node, dict):
        argument = node({"a": weights, "b": blocks})
    else:
        argument = node([weights, blocks])

    def step(pool: kv.KVPool, tree: Any) -> Any:
        return pool, jax.tree.leaves(tree)

    for _ in range(2):  # classes are asked once for what they are
        *_, last = manager.update(step, argument)
        assert last.tolist() == [a.id]


@pytest.mark.parametrize("guard", ["allow", "disallow"])
def test_an_argument_may_hold_nothing(manager: kv.BlockManager, guard: str) -> None:
    def step(pool: kv.KVPool, x: Any, *, y: Any) -> Any:
        return pool, (x, y)

    for nothing in (None, (), {}, [None, {"a": None}]):
        with jax.transfer_guard(guard):
            assert manager.update(step, nothing, y=nothing) == (nothing, nothing)


def test_an_argument_that_holds_itself(manager: kv.BlockManager) -> None:
    argument: list[Any] = [jnp.ones(3)]
    argument.append(argument)
    with pytest.raises(RecursionError):
        manager.update(add, argument)
    manager.update(add, 1)
    assert all_are(manager, 1)


@pytest.mark.parametrize("part", ["Block", "Layer", "Piece"])
def test_a_block_is_no_argument_of_a_step(manager: kv.BlockManager, part: str) -> None:
    (block,) = manager.allocate_blocks(1)
    x = {"Block": block, "Layer": block[0], "Piece": block[0].k}[part]
    words = rf"update: .* arrays or a BlockList, got {part}\(.*jnp\.asarray.*block\.id"
    for argument in (x, {"deep": [x]}):
        with pytest.raises(TypeError, match=words):
            manager.update(add, argument)
        with pytest.raises(TypeError, match=words):
            manager.update(add, number=argument)
    manager.update(add, jnp.asarray(x).max() + 1)
    assert all_are(manager, 1)


def test_results_are_pytrees_of_any_kind(manager: kv.BlockManager) -> None:
    def step(pool: kv.KVPool, x: Any) -> Any:
        return add(pool, x), Pair([x, None], {"twice": 2 * x})

    for x in (1, 2):
        result = manager.update(step, x)
        assert isinstance(result, Pair) and result.a == [x, None]
        assert result.b == {"twice": 2 * x}


def test_a_result_that_cannot_be_put_together_loses_nothing(
    manager: kv.BlockManager,
) -> None:
    class Bad:
        pass

    def fail(*_: Any) -> Any:
        raise ValueError("no such thing")

    jax.tree_util.register_pytree_node(Bad, lambda bad: ((1,), None), fail)
    block = manager.allocate_blocks(1)[0]
    with pytest.raises(ValueError, match="no such thing"):
        manager.update(lambda pool: (add(pool), Bad()))
    assert block and all_are(manager, 1)


def test_a_step_that_moves_the_pool_is_refused_before_it_runs() -> None:
    manager = make_manager()
    host = jax.memory.Space.Host

    def offload(pool: kv.KVPool) -> kv.KVPool:
        return kv.KVPool(jax.device_put(pool.data, host), pool.spec)

    with pytest.raises(ValueError, match=r"update: .*must stay in device memory"):
        manager.update(offload)
    assert all_are(manager, 0)


@pytest.mark.parametrize("contiguous", [True, False])
def test_updates_pass_a_transfer_guard(contiguous: bool) -> None:
    manager = make_manager(contiguous=contiguous)
    blocks = manager.allocate_blocks(2)
    values = np.full(blocks[0].shape, 3, np.float32)

    def step(pool: kv.KVPool, ids: Any, number: Any, kind: str) -> Any:
        return add(pool, number), (ids + 1, len(kind))

    with jax.transfer_guard("disallow"):
        ids, _ = manager.update(step, blocks.ids, 1, "two", static_argnames="kind")
        more, _ = manager.update(
            step, ids=blocks, number=np.float32(1), kind="two", static_argnames="kind"
        )
        blocks[0].copy_from(values)
        blocks[1][1].copy_from(blocks[0][0])
        blocks[1][0].k.copy_from(values[0, 0])
        with pytest.raises(ValueError, match="must have shape"):
            blocks[0].copy_from(values[0])
        got = [np.asarray(blocks[1]), np.asarray(blocks[1][0].v)]
    assert ids.tolist() == more.tolist() == [1, 2]
    assert (got[0][1] == 3).all() and (got[0][0, 0] == 3).all()
    assert (got[1] == 2).all()


# ---- what is kept --------------------------------------------------------------------


class Engine:
    def __init__(self) -> None:
        self.traces = 0

    def step(self, pool: kv.KVPool) -> kv.KVPool:
        self.traces += 1
        return add(pool)

    def other(self, pool: kv.KVPool) -> kv.KVPool:
        return add(pool, 10)


def test_methods_are_found_again(manager: kv.BlockManager) -> None:
    one, two = Engine(), Engine()
    for _ in range(3):
        manager.update(one.step)
        manager.update(two.step)
        manager.update(one.other)
    assert (one.traces, two.traces) == (1, 1) and all_are(manager, 36)


def test_the_owner_of_a_method_is_let_go(manager: kv.BlockManager) -> None:
    engine = Engine()
    manager.update(engine.step)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None, "a manager that lives keeps it"
    assert len(manager._memory.programs) == 0, "its program is of no use any more"
    manager.update(Engine().step)
    assert all_are(manager, 2)


class Plain:
    """Neither it nor its method can be referred to weakly."""

    __slots__ = ("traces",)

    def __init__(self) -> None:
        self.traces: list[Any] = []

    def __call__(self, pool: kv.KVPool) -> kv.KVPool:
        self.traces.append(pool)
        return add(pool)


def test_what_only_a_manager_can_keep_goes_with_it(manager: kv.BlockManager) -> None:
    class Watched(list[Any]):
        pass

    step = Plain()
    step.traces = Watched()
    gone = weakref.ref(step.traces)
    manager.update(step)
    manager.update(step)
    assert len(step.traces) == 1 and all_are(manager, 2)
    del step
    gc.collect()
    assert gone() is not None
    manager.close()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("how", ["close", "collect"])
def test_compiled_steps_go_with_their_manager(how: str) -> None:
    manager = make_manager()
    manager.update(add)
    (block,) = manager.allocate_blocks(1)
    for _ in range(2):
        block.copy_from(np.ones(block.shape, np.float32))
    programs = manager._memory.programs._programs.values()
    gone = [weakref.ref(program.call) for program in programs]
    assert len(gone) == 2, "the step's and that of copy_from"
    del programs
    if how == "close":
        manager.close()
    else:
        del manager, block
    gc.collect()
    assert [call() for call in gone] == [None, None]


def test_lambdas_do_not_pile_up(manager: kv.BlockManager) -> None:
    for number in range(3):
        manager.update(lambda pool, number=number: add(pool, number))
    gc.collect()
    assert len(manager._memory.programs) == 0 and all_are(manager, 3)


# ---- pools that are lost -------------------------------------------------------------


def fail_on_the_device(pool: kv.KVPool) -> kv.KVPool:
    """Its program fails when it runs, after it was given the pool."""

    def fail(_: Any) -> Any:
        raise ArithmeticError("no more")

    nothing = jax.ShapeDtypeStruct((), jnp.float32)
    return add(pool, jax.pure_callback(fail, nothing, jnp.float32(1)))


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("contiguous", [True, False])
def test_a_program_that_fails_says_what_is_lost_and_what_to_do(
    contiguous: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    manager = make_manager(contiguous=contiguous)
    block, other = manager.allocate_blocks(2)
    with pytest.raises(kv.PoolLostError) as lost:
        manager.update(fail_on_the_device)
        np.asarray(block)  # on a GPU programs fail behind the call
    fresh = "KVPool.zeros(manager.spec, manager.num_blocks"
    fresh += ")" if contiguous else ", contiguous=False)"
    for part in (f"manager.pool = {fresh}", "fill the blocks again"):
        assert part in str(lost.value)
    if jax.default_backend() == "cpu":  # where the call itself has failed
        assert "'fail_on_the_device' failed after the pool" in str(lost.value)
    assert lost.value.__cause__ is not None and isinstance(lost.value, RuntimeError)
    assert not block and manager.num_free_blocks == BLOCKS - 2
    said = r"block 0\b.*\): what its pool held is lost, since '.*' failed after"
    uses: list[tuple[type[Exception], Callable[[], Any]]] = [
        (RuntimeError, lambda: np.asarray(block)),
        (ValueError, lambda: block.copy_from(np.zeros(block.shape, np.float32))),
        (BufferError, lambda: block[0].__dlpack__()),
    ]
    for error, use in uses:
        with pytest.raises(error, match=said):
            use()
    with pytest.raises(RuntimeError, match=r"update: what its pool held is lost"):
        manager.update(add)
    # The remedy that the message tells.
    manager.pool = eval(fresh, {"KVPool": kv.KVPool, "manager": manager})
    assert block and other and not np.asarray(block).any()
    manager.update(add)
    assert all_are(manager, 1)
    capfd.readouterr()  # what XLA says of the callback


def test_the_remedy_names_the_device_and_the_memory() -> None:
    second = jax.devices("cpu")[1]
    manager = make_manager(device=second, memory_kind="pinned_host")
    block = manager.allocate_blocks(1)[0]
    jax.jit(add, donate_argnums=0)(manager.pool)
    with pytest.raises(RuntimeError) as error:
        np.asarray(block)
    remedy = str(error.value).rsplit("failed, ", 1)[1]
    names = {"KVPool": kv.KVPool, "manager": manager, "jax": jax}
    manager.pool = eval(remedy, names)
    assert block and manager.pool.data.devices() == {second}


def test_a_layer_that_is_gone_is_the_whole_pool() -> None:
    manager = make_manager(contiguous=False)
    block = manager.allocate_blocks(1)[0]
    manager.pool.data[1].delete()
    assert not block and not block[0]
    with pytest.raises(RuntimeError, match="update: its pool was donated"):
        manager.update(add)


def test_errors_of_other_threads_updates_stay_theirs(manager: kv.BlockManager) -> None:
    def work() -> None:
        with pytest.raises(TypeError, match="must return the new KVPool"):
            manager.update(lambda pool: None)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    manager.update(add)
    assert all_are(manager, 1)
