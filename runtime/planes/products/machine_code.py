"""Functions that LLVM makes for this machine, and running them over the blocks of a matrix.

What LLVM is given is written here and beside it (modules named `..._code`); nothing of a graph comes near it. Sums are
written in one order, with fused multiply-adds and without leave to change it, so that what is written gives the same bits
whatever runs beside it, on any number of threads and on any CPU; it was seen on x86-64 with AVX2 alone.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

LANES = 16  # numbers that are counted with at once: the rows of a matrix that a block has
_GROUP = 4  # blocks that are run with all rows before the next
_THREAD_PRODUCTS = 1 << 22  # for fewer another thread does not pay
_LOWEST = -87.0  # of which exp is the smallest that we tell from 0
_LOG2_E = 1.4426950408889634
# ln 2 in two parts, the first of so few bits that whole multiples of it are exact, and exp(x) - 1 - x over x squared for half
# of it on both sides of 0, of least error (Cephes, expf.c).
_LN2 = (0.693359375, -2.12194440e-4)
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_ROUND = 1.5 * 2**23  # a float that much greater has no place for fractions

Function = Callable[..., None]  # of addresses and whole numbers


class Code:
    """A function that is being written with `llvmlite.ir`: of so many addresses, and then of so many whole numbers. `wide`: for a
    machine whose registers hold LANES floats, and of which there are 32."""

    def __init__(self, ir: Any, triple: str, addresses: int, numbers: int, wide: bool) -> None:
        self.ir, self.wide = ir, wide
        self.word, self.byte = ir.IntType(64), ir.IntType(8)
        self.half, self.float = ir.HalfType(), ir.FloatType()
        self.floats, self.integers = (ir.VectorType(kind, LANES) for kind in (self.float, ir.IntType(32)))
        self.zero, self.zeros = ir.Constant(self.float, 0.0), ir.Constant(self.floats, [0.0] * LANES)
        self.module = ir.Module()
        self.module.triple = triple
        kind = ir.FunctionType(ir.VoidType(), [ir.PointerType()] * addresses + [self.word] * numbers)
        self._function = ir.Function(self.module, kind, "function")
        fused = ir.FunctionType(self.floats, [self.floats] * 3)
        self._fused = ir.Function(self.module, fused, f"llvm.fma.v{LANES}f32")
        root = ir.FunctionType(self.float, [self.float])
        self._root = ir.Function(self.module, root, "llvm.sqrt.f32")
        self.at = ir.IRBuilder(self._function.append_basic_block())

    @property
    def arguments(self) -> Sequence[Any]:
        return self._function.args  # type: ignore[no-any-return]

    def loop(
        self,
        first: Any,
        last: Any,
        step: int,
        body: Callable[[Any, Sequence[Any]], Sequence[Any]],
        carried: Sequence[Any] = (),
    ) -> Sequence[Any]:
        """Runs `body` from first to before last, not at all where these are one; `carried` are the values that it gives on."""
        at, before = self.at, self.at.block
        head, inside, after = (self._function.append_basic_block() for _ in range(3))
        at.branch(head)
        at.position_at_end(head)
        index = at.phi(self.word)
        index.add_incoming(first, before)
        held = [at.phi(value.type) for value in carried]
        for phi, value in zip(held, carried, strict=True):
            phi.add_incoming(value, before)
        at.cbranch(at.icmp_unsigned("<", index, last), inside, after)
        at.position_at_end(inside)
        made = body(index, held)
        index.add_incoming(at.add(index, self.number(step)), at.block)
        for phi, value in zip(held, made, strict=True):
            phi.add_incoming(value, at.block)
        at.branch(head)
        at.position_at_end(after)
        return held

    def whole(self, first: Any, last: Any, step: int) -> Any:
        """Where the last of the whole steps from first ends."""
        return self.at.sub(last, self.at.urem(self.at.sub(last, first), self.number(step)))

    def tiles(
        self,
        first: Any,
        last: Any,
        rows: Any,
        shapes: Sequence[tuple[int, int]],
        tile: Callable[[Any, int, Any, int], None],
    ) -> None:
        """`tile(row, rows, block, blocks)` for every row and every block from first to before last: as many at once as `shapes`
        (rows, blocks) has, in its order, as long as there are as many. A few blocks are run with all rows before the next, so
        that they stay in a cache and a matrix comes from memory once."""

        def group(begin: Any, _: Sequence[Any]) -> Sequence[Any]:
            beyond = self.at.add(begin, self.number(_GROUP))
            end = self.at.select(self.at.icmp_unsigned("<", beyond, last), beyond, last)
            done: Any = self.number(0)
            for count, many in groupby(shapes, itemgetter(0)):
                until = self.whole(done, rows, count)
                sizes = [blocks for _, blocks in many]

                def several(
                    row: Any, _: Sequence[Any], count: int = count, sizes: list[int] = sizes
                ) -> Sequence[Any]:
                    block = begin
                    for blocks in sizes:
                        whole = self.whole(block, end, blocks)

                        def some(index: Any, _: Sequence[Any], blocks: int = blocks) -> Sequence[Any]:
                            tile(row, count, index, blocks)
                            return ()

                        self.loop(block, whole, blocks, some)
                        block = whole
                    return ()

                self.loop(done, until, count, several)
                done = until
            return ()

        self.loop(first, last, _GROUP, group)

    def load(self, base: Any, place: Any, kind: Any, count: int = 0) -> Any:
        """One number of a kind, or so many as a vector."""
        address = self.at.gep(base, [place], source_etype=kind)
        found = self.at.load(address, typ=self.ir.VectorType(kind, count) if count else kind)
        found.align = 1 if kind == self.byte else 2 if kind == self.half else 4
        return found

    def store(self, value: Any, base: Any, place: Any) -> None:
        self.at.store(value, self.at.gep(base, [place], source_etype=self.float)).align = 4

    def fma(self, one: Any, other: Any, total: Any) -> Any:
        return self.at.call(self._fused, [one, other, total])

    def spread(self, one: Any) -> Any:
        """One float in all lanes."""
        empty = self.ir.Constant(self.floats, self.ir.Undefined)
        placed = self.at.insert_element(empty, one, self.ir.Constant(self.ir.IntType(32), 0))
        return self.at.shuffle_vector(placed, empty, self.ir.Constant(self.integers, [0] * LANES))

    def exp(self, value: Any) -> Any:
        """Of numbers that are not above 0: to 2 units in the last place, and 0 below _LOWEST."""
        at, all_of = self.at, self.all
        rounded = self.fma(value, all_of(_LOG2_E), all_of(_ROUND))
        whole = at.fsub(rounded, all_of(_ROUND))
        rest = value
        for part in _LN2:
            rest = self.fma(whole, all_of(-part), rest)
        found = all_of(_EXP[0])
        for number in _EXP[1:]:
            found = self.fma(found, rest, all_of(number))
        found = at.fadd(self.fma(found, at.fmul(rest, rest), rest), all_of(1.0))
        # What is in the last bits of `rounded` is the power of two.
        power = at.shl(at.bitcast(rounded, self.integers), self.whole_numbers(23))
        power = at.bitcast(at.add(power, self.whole_numbers(0x3F800000)), self.floats)
        return at.select(at.fcmp_ordered("<", value, all_of(_LOWEST)), self.zeros, at.fmul(found, power))

    def sqrt(self, one: Any) -> Any:
        """Of one float."""
        return self.at.call(self._root, [one])

    def first(self, lanes: Any) -> Any:
        """The float in the first lane."""
        return self.at.extract_element(lanes, self.ir.Constant(self.ir.IntType(32), 0))

    def sum(self, lanes: Any) -> Any:
        """Of all lanes: of each half's, and so on."""
        count = LANES
        while count > 1:
            count //= 2
            kind = self.ir.VectorType(self.ir.IntType(32), count)
            halves = [
                self.at.shuffle_vector(
                    lanes, lanes, self.ir.Constant(kind, list(range(first, first + count)))
                )
                for first in (0, count)
            ]
            lanes = self.at.fadd(*halves)
        return self.first(lanes)

    def all(self, number: float) -> Any:
        """A float that is known now, in all lanes."""
        return self.ir.Constant(self.floats, [number] * LANES)

    def number(self, value: int) -> Any:
        return self.ir.Constant(self.word, value)

    def whole_numbers(self, value: int) -> Any:
        """One whole number in all lanes."""
        return self.ir.Constant(self.integers, [value] * LANES)


def compiled(addresses: int, numbers: int, write: Callable[[Code], None]) -> Function | None:
    """What `write` writes, for this machine; None where LLVM makes nothing for it, or nothing fast."""
    try:
        from llvmlite import binding, ir  # 40 MiB of memory, which a peer without such a matrix does not need
    except ImportError:  # a machine that LLVM is not made for
        return None
    try:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        features, triple = binding.get_host_cpu_features(), binding.get_process_triple()
        # Without these, LLVM calls functions of a compiler's library, which are slow if they are there at all.
        if triple.startswith("x86_64") and not all(features.get(name) for name in ("avx2", "fma", "f16c")):
            return None
        if not triple.startswith(("x86_64", "aarch64", "arm64")):
            return None
        code = Code(ir, triple, addresses, numbers, bool(features.get("avx512f")))
        write(code)
        code.at.ret_void()
        module = binding.parse_assembly(str(code.module))
        module.verify()
        machine = binding.Target.from_triple(triple).create_target_machine(
            cpu=binding.get_host_cpu_name(), features=features.flatten(), opt=3, jit=True
        )
        # More than that takes up to four times as long, and what it makes was a fifteenth faster at best.
        builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=0))
        builder.getModulePassManager().run(module, builder)
        engine = binding.create_mcjit_compiler(module, machine)
        engine.finalize_object()
    except (RuntimeError, OSError):
        return None
    _ENGINES.append(engine)  # whose memory the code lies in
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * addresses, *[ctypes.c_int64] * numbers)
    return kind(engine.get_function_address("function"))


_ENGINES: list[Any] = []


def float_bits(value: float) -> int:
    """A float as such a function takes it among its whole numbers; infinity for one that is too large."""
    return int.from_bytes(bytes(ctypes.c_float(value)), sys.byteorder)


def over_blocks(
    function: Function,
    addresses: Sequence[int],
    blocks: int,
    sizes: Sequence[int],
    *,
    products: int,
    threads: int,
) -> None:
    """`function(*addresses, first block, last, *sizes)` over all blocks, by as many threads as pay for so many products."""
    parts = min(threads, products // _THREAD_PRODUCTS)
    if parts < 2:
        function(*addresses, 0, blocks, *sizes)
        return
    bounds = [blocks * part // parts for part in range(parts + 1)]
    for each in [
        _threads(threads).submit(function, *addresses, first, last, *sizes)
        for first, last in pairwise(bounds)
    ]:
        each.result()


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "products")
