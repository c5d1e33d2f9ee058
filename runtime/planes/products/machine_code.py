"""Functions that LLVM compiles just in time for this machine, and calls of them over the blocks of a matrix.

The LLVM IR is generated here and in the modules named `..._code`; nothing of a graph enters it. The IR fixes the reduction order and
uses fused multiply-adds, without fast-math flags, so a function gives the same bits in any batch, on any number of threads and on any
CPU. This was observed on x86-64 with AVX2 only.
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

LANES = 16  # of a vector; a block has as many rows of a matrix
_GROUP_BLOCKS = 4  # blocks that all rows are run with before the next group
_THREAD_MULTIPLY_ADDS = 1 << 22  # fewer are not worth another thread
_MIN_EXPONENT = -87.0  # exp of less counts as 0
_LOG2_E = 1.4426950408889634
# ln 2 in two parts, the first of so few bits that its integer multiples are exact; and the minimax polynomial of
# (exp(x) - 1 - x) / x**2 for |x| <= ln(2) / 2 (Cephes, expf.c).
_LN2 = (0.693359375, -2.12194440e-4)
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_ROUND_TO_INTEGER = 1.5 * 2**23  # adding it rounds: a float of this size has no fraction bits

Function = Callable[..., None]  # of addresses and integers


class Code:
    """Generates one function with `llvmlite.ir`, whose parameters are `pointers` addresses and then `integers` 64-bit integers.
    `wide_registers`: the machine has 32 vector registers of LANES floats each (AVX-512)."""

    def __init__(self, ir: Any, triple: str, pointers: int, integers: int, wide_registers: bool) -> None:
        self.ir, self.wide_registers = ir, wide_registers
        self.int64, self.int16, self.int8 = ir.IntType(64), ir.IntType(16), ir.IntType(8)
        self.float16, self.float32 = ir.HalfType(), ir.FloatType()
        self.float_lanes, self.int_lanes = (
            ir.VectorType(lane_type, LANES) for lane_type in (self.float32, ir.IntType(32))
        )
        self.zero, self.zero_lanes = (
            ir.Constant(self.float32, 0.0),
            ir.Constant(self.float_lanes, [0.0] * LANES),
        )
        self.module = ir.Module()
        self.module.triple = triple
        signature = ir.FunctionType(ir.VoidType(), [ir.PointerType()] * pointers + [self.int64] * integers)
        self._function = ir.Function(self.module, signature, "function")
        fma_type = ir.FunctionType(self.float_lanes, [self.float_lanes] * 3)
        self._fma = ir.Function(self.module, fma_type, f"llvm.fma.v{LANES}f32")
        sqrt_type = ir.FunctionType(self.float32, [self.float32])
        self._sqrt = ir.Function(self.module, sqrt_type, "llvm.sqrt.f32")
        self.builder = ir.IRBuilder(self._function.append_basic_block())

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
        """A loop over range(first, last, step). `body` takes the index and the loop-carried values, which start as `carried`, and returns
        their next values. Returns the last ones."""
        build, entry = self.builder, self.builder.block
        header, body_block, exit_block = (self._function.append_basic_block() for _ in range(3))
        build.branch(header)
        build.position_at_end(header)
        index = build.phi(self.int64)
        index.add_incoming(first, entry)
        phis = [build.phi(value.type) for value in carried]
        for phi, value in zip(phis, carried, strict=True):
            phi.add_incoming(value, entry)
        build.cbranch(build.icmp_unsigned("<", index, last), body_block, exit_block)
        build.position_at_end(body_block)
        results = body(index, phis)
        index.add_incoming(build.add(index, self.index(step)), build.block)
        for phi, value in zip(phis, results, strict=True):
            phi.add_incoming(value, build.block)
        build.branch(header)
        build.position_at_end(exit_block)
        return phis

    def aligned_end(self, first: Any, last: Any, step: int) -> Any:
        """The end of the last full step in [first, last)."""
        return self.builder.sub(last, self.builder.urem(self.builder.sub(last, first), self.index(step)))

    def tiles(
        self,
        first: Any,
        last: Any,
        rows: Any,
        shapes: Sequence[tuple[int, int]],
        tile: Callable[[Any, int, Any, int], None],
    ) -> None:
        """Call `tile(row, rows, block, blocks)` for tiles that cover all rows and the blocks [first, last). `shapes` (rows, blocks) of
        tiles are tried in order, each as long as it fits. All rows run with one group of blocks before the next group, so that the
        group stays in a cache and the matrix is read from memory once."""

        def group(begin: Any, _: Sequence[Any]) -> Sequence[Any]:
            group_end = self.builder.add(begin, self.index(_GROUP_BLOCKS))
            end = self.builder.select(self.builder.icmp_unsigned("<", group_end, last), group_end, last)
            rows_done: Any = self.index(0)
            for count, of_count in groupby(shapes, itemgetter(0)):
                rows_end = self.aligned_end(rows_done, rows, count)
                block_counts = [blocks for _, blocks in of_count]

                def row_tile(
                    row: Any, _: Sequence[Any], count: int = count, block_counts: list[int] = block_counts
                ) -> Sequence[Any]:
                    block = begin
                    for blocks in block_counts:
                        aligned = self.aligned_end(block, end, blocks)

                        def block_tile(index: Any, _: Sequence[Any], blocks: int = blocks) -> Sequence[Any]:
                            tile(row, count, index, blocks)
                            return ()

                        self.loop(block, aligned, blocks, block_tile)
                        block = aligned
                    return ()

                self.loop(rows_done, rows_end, count, row_tile)
                rows_done = rows_end
            return ()

        self.loop(first, last, _GROUP_BLOCKS, group)

    def load(self, base: Any, offset: Any, element: Any, count: int = 0) -> Any:
        """One element, or a vector of `count`."""
        address = self.builder.gep(base, [offset], source_etype=element)
        value = self.builder.load(address, typ=self.ir.VectorType(element, count) if count else element)
        value.align = 1 if element == self.int8 else 2 if element in (self.float16, self.int16) else 4
        return value

    def untyped(self, pointer: Any) -> Any:
        """A typed pointer, as `alloca` returns it, for `load` and `store`."""
        return self.builder.inttoptr(self.builder.ptrtoint(pointer, self.int64), self.ir.PointerType())

    def store(self, value: Any, base: Any, offset: Any) -> None:
        self.builder.store(value, self.builder.gep(base, [offset], source_etype=self.float32)).align = 4

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.builder.call(self._fma, [a, b, c])

    def splat(self, scalar: Any) -> Any:
        """A vector with the scalar in all lanes."""
        undefined = self.ir.Constant(self.float_lanes, self.ir.Undefined)
        first_set = self.builder.insert_element(undefined, scalar, self.ir.Constant(self.ir.IntType(32), 0))
        return self.builder.shuffle_vector(
            first_set, undefined, self.ir.Constant(self.int_lanes, [0] * LANES)
        )

    def exp(self, value: Any) -> Any:
        """exp of lanes that are at most 0, within 2 ULP; 0 below _MIN_EXPONENT."""
        build, constant = self.builder, self.float_constant
        rounded = self.fma(value, constant(_LOG2_E), constant(_ROUND_TO_INTEGER))
        multiple = build.fsub(rounded, constant(_ROUND_TO_INTEGER))
        remainder = value
        for part in _LN2:
            remainder = self.fma(multiple, constant(-part), remainder)
        polynomial = constant(_EXP[0])
        for coefficient in _EXP[1:]:
            polynomial = self.fma(polynomial, remainder, constant(coefficient))
        polynomial = build.fadd(
            self.fma(polynomial, build.fmul(remainder, remainder), remainder), constant(1.0)
        )
        # The low bits of `rounded` hold the exponent.
        power = build.shl(build.bitcast(rounded, self.int_lanes), self.int_constant(23))
        power = build.bitcast(build.add(power, self.int_constant(0x3F800000)), self.float_lanes)
        return build.select(
            build.fcmp_ordered("<", value, constant(_MIN_EXPONENT)),
            self.zero_lanes,
            build.fmul(polynomial, power),
        )

    def sqrt(self, scalar: Any) -> Any:
        return self.builder.call(self._sqrt, [scalar])

    def first_lane(self, lanes: Any) -> Any:
        return self.builder.extract_element(lanes, self.ir.Constant(self.ir.IntType(32), 0))

    def lanes_of(self, lanes: Any, first: int, count: int) -> Any:
        """A vector of `count` lanes of another."""
        mask_type = self.ir.VectorType(self.ir.IntType(32), count)
        mask = self.ir.Constant(mask_type, list(range(first, first + count)))
        return self.builder.shuffle_vector(lanes, lanes, mask)

    def lane_sum(self, lanes: Any) -> Any:
        """The sum of all lanes, by halving: a fixed reduction order."""
        count = lanes.type.count
        while count > 1:
            count //= 2
            halves = [self.lanes_of(lanes, first, count) for first in (0, count)]
            lanes = self.builder.fadd(*halves)
        return self.first_lane(lanes)

    def float_constant(self, value: float) -> Any:
        """A vector constant."""
        return self.ir.Constant(self.float_lanes, [value] * LANES)

    def index(self, value: int) -> Any:
        return self.ir.Constant(self.int64, value)

    def int_constant(self, value: int) -> Any:
        """A vector constant."""
        return self.ir.Constant(self.int_lanes, [value] * LANES)


def jit_compile(pointers: int, integers: int, write: Callable[[Code], None]) -> Function | None:
    """The function that `write` generates, compiled for this machine; None where LLVM does not support the machine, or without the
    instructions that make it fast."""
    try:
        from llvmlite import binding, ir  # 40 MiB, which a peer without such a matrix does not need
    except ImportError:  # no wheel for this machine
        return None
    try:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        features, triple = binding.get_host_cpu_features(), binding.get_process_triple()
        # Without these, LLVM calls functions of the compiler's runtime library: slow, and perhaps missing.
        if triple.startswith("x86_64") and not all(features.get(name) for name in ("avx2", "fma", "f16c")):
            return None
        if not triple.startswith(("x86_64", "aarch64", "arm64")):
            return None
        code = Code(ir, triple, pointers, integers, bool(features.get("avx512f")))
        write(code)
        code.builder.ret_void()
        module = binding.parse_assembly(str(code.module))
        module.verify()
        machine = binding.Target.from_triple(triple).create_target_machine(
            cpu=binding.get_host_cpu_name(), features=features.flatten(), opt=3, jit=True
        )
        # Higher levels take up to four times as long to compile, for code that was a fifteenth faster at best.
        builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=0))
        builder.getModulePassManager().run(module, builder)
        engine = binding.create_mcjit_compiler(module, machine)
        engine.finalize_object()
    except (RuntimeError, OSError):
        return None
    _ENGINES.append(engine)  # an engine owns the memory of its code
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * pointers, *[ctypes.c_int64] * integers)
    return prototype(engine.get_function_address("function"))


_ENGINES: list[Any] = []


def float_bits(value: float) -> int:
    """The bits of a float32, to be passed as an integer; infinity for a value that is too large."""
    return int.from_bytes(bytes(ctypes.c_float(value)), sys.byteorder)


def run_blocks(
    function: Function,
    pointers: Sequence[int],
    blocks: int,
    sizes: Sequence[int],
    *,
    multiply_adds: int,
    threads: int,
) -> None:
    """Call `function(*pointers, first, last, *sizes)` for ranges that cover all blocks, on up to `threads` threads where there are enough
    `multiply_adds`."""
    shares = min(threads, multiply_adds // _THREAD_MULTIPLY_ADDS)
    if shares < 2:
        function(*pointers, 0, blocks, *sizes)
        return
    bounds = [blocks * part // shares for part in range(shares + 1)]
    for future in [
        _threads(threads).submit(function, *pointers, first, last, *sizes) for first, last in pairwise(bounds)
    ]:
        future.result()


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "products")
