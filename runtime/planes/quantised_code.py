"""Products of float32 rows with a matrix stored as int8 or int4, as machine code that LLVM makes on this machine.

PyTorch's own kernels for such matrices are fast where a CPU has AVX-512 only: with AVX2 they took 7 to 30 times as long as
the product of the same matrix in float32. What LLVM is given is written here and depends on two sizes of a number, a dtype
and a flag: nothing of a graph comes near it.

The order of the sums is written out, with fused multiply-adds and without leave to change it: for each output, a sum over the
columns of a group, one after another, is multiplied by the group's scale and added to what the groups before gave. So a row's
bits depend neither on the rows beside it nor on the number of threads. What is written would give the same ones on any CPU; it
was seen on x86-64 with AVX2 alone.

Matrices lie in blocks of 16 rows, by columns in a block: what is multiplied by one number of the input lies together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

try:
    from llvmlite import binding, ir
except ImportError:  # a machine that LLVM is not made for
    binding = ir = None

LANES = 16  # rows of a block
_ROWS = (4, 2, 1)  # of the input, that are run at once: more would not fit into the registers of AVX2

# input, weight, scales, minimums, output: addresses; first block, last, rows of the input, groups, columns of a group,
# floats from one row of the output to the next
Product = Callable[[int, int, int, int, int, int, int, int, int, int, int], None]


@cache
def product(bits: int, half: bool, minimums: bool) -> Product | None:
    """The product for numbers of 8 or 4 bits, with scales and minimums in float16 (`half`) or float32; None where there
    is none for this machine. It writes 16 outputs a block for each row."""
    if binding is None:
        return None
    try:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        features = binding.get_host_cpu_features()
        triple = binding.get_process_triple()
        # Without these, LLVM calls functions of a compiler's library, which are slow if they are there at all.
        if triple.startswith("x86_64") and not all(features.get(name) for name in ("avx2", "fma", "f16c")):
            return None
        if not triple.startswith(("x86_64", "aarch64", "arm64")):
            return None
        written = _Writer(bits, half, minimums, triple).write()
        module = binding.parse_assembly(written)
        module.verify()
        target = binding.Target.from_triple(triple)
        cpu = binding.get_host_cpu_name()
        machine = target.create_target_machine(cpu=cpu, features=features.flatten(), opt=3, jit=True)
        builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
        builder.getModulePassManager().run(module, builder)
        engine = binding.create_mcjit_compiler(module, machine)
        engine.finalize_object()
    except (RuntimeError, OSError):
        return None
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 5, *[ctypes.c_int64] * 6)
    function = kind(engine.get_function_address("product"))
    _ENGINES.append(engine)  # whose memory the code lies in
    return function


_ENGINES: list[Any] = []


class _Writer:
    def __init__(self, bits: int, half: bool, minimums: bool, triple: str) -> None:
        self.bits, self.minimums = bits, minimums
        self.word = ir.IntType(64)
        self.byte = ir.IntType(8)
        self.float = ir.FloatType()
        self.share = ir.HalfType() if half else self.float
        self.floats = ir.VectorType(self.float, LANES)
        self.module = ir.Module()
        self.module.triple = triple
        pointer = ir.PointerType()
        kind = ir.FunctionType(ir.VoidType(), [pointer] * 5 + [self.word] * 6)
        self.function = ir.Function(self.module, kind, "product")
        fused = ir.FunctionType(self.floats, [self.floats] * 3)
        self.fused = ir.Function(self.module, fused, f"llvm.fma.v{LANES}f32")
        self.code = ir.IRBuilder(self.function.append_basic_block())

    def write(self) -> str:
        code, args = self.code, self.function.args
        self.input, self.weight, self.scales, self.offsets, self.output = args[:5]
        first, last, rows, self.groups, self.group, self.width = args[5:]
        self.columns = code.mul(self.groups, self.group)
        self.held = self.columns if self.bits == 8 else code.lshr(self.columns, self.number(1))

        def block(at: Any, _: Sequence[Any]) -> Sequence[Any]:
            done: Any = self.number(0)
            for count in _ROWS:  # so many at once while there are as many
                end = code.sub(rows, code.urem(code.sub(rows, done), self.number(count)))
                self.loop(done, end, count, (), partial(self.rows, at, count))
                done = end
            return ()

        self.loop(first, last, 1, (), block)
        code.ret_void()
        return str(self.module)

    def rows(self, block: Any, count: int, row: Any, _: Sequence[Any]) -> Sequence[Any]:
        """`count` rows of the input, from `row`, with one block of the matrix."""
        code = self.code
        zeros, zero = ir.Constant(self.floats, [0.0] * LANES), ir.Constant(self.float, 0.0)
        weight = code.mul(block, code.mul(self.held, self.number(LANES)))
        shares = code.mul(block, code.mul(self.groups, self.number(LANES)))
        inputs = [code.mul(code.add(row, self.number(r)), self.columns) for r in range(count)]
        sums = count if self.minimums else 0  # of the input over a group: what a minimum is multiplied by

        def group(at: Any, totals: Sequence[Any]) -> Sequence[Any]:
            begin = code.mul(at, self.group)

            def columns(column: Any, found: Sequence[Any]) -> Sequence[Any]:
                place = code.add(begin, column)
                held = place if self.bits == 8 else code.lshr(place, self.number(1))
                stored = self.load(
                    self.weight, code.add(weight, code.mul(held, self.number(LANES))), self.byte, LANES
                )
                products, given = list(found[:count]), list(found[count:])
                for step, numbers in enumerate(self.numbers(stored)):
                    for r in range(count):
                        where = code.add(inputs[r], code.add(place, self.number(step)))
                        one = self.load(self.input, where, self.float)
                        products[r] = code.call(self.fused, [self.spread(one), numbers, products[r]])
                        if sums:
                            given[r] = code.fadd(given[r], one)
                return [*products, *given]

            start = [zeros] * count + [zero] * sums
            found = self.loop(self.number(0), self.group, 8 // self.bits, start, columns)
            place = code.add(shares, code.mul(at, self.number(LANES)))
            scales = self.load_shares(self.scales, place)
            totals = [
                code.call(self.fused, [p, scales, t]) for p, t in zip(found[:count], totals, strict=True)
            ]
            if sums:
                offsets = self.load_shares(self.offsets, place)
                totals = [
                    code.call(self.fused, [self.spread(g), offsets, t])
                    for g, t in zip(found[count:], totals, strict=True)
                ]
            return totals

        totals = self.loop(self.number(0), self.groups, 1, [zeros] * count, group)
        for r, total in enumerate(totals):
            place = code.add(
                code.mul(code.add(row, self.number(r)), self.width), code.mul(block, self.number(LANES))
            )
            code.store(total, code.gep(self.output, [place], source_etype=self.float)).align = 4
        return ()

    def numbers(self, stored: Any) -> list[Any]:
        """The numbers in 16 bytes as floats: of one column, or of two with 4 bits."""
        wide = ir.VectorType(ir.IntType(32), LANES)
        if self.bits == 8:
            parts = [stored]
        else:
            low, shift, middle = (ir.Constant(stored.type, [n] * LANES) for n in (15, 4, 8))
            parts = [self.code.and_(stored, low), self.code.lshr(stored, shift)]
            if not self.minimums:
                parts = [self.code.sub(part, middle) for part in parts]
        return [self.code.sitofp(self.code.sext(part, wide), self.floats) for part in parts]

    def loop(
        self,
        first: Any,
        last: Any,
        step: int,
        carried: Sequence[Any],
        body: Callable[[Any, Sequence[Any]], Sequence[Any]],
    ) -> Sequence[Any]:
        """Runs `body` from first to before last, not at all where these are one; `carried` are the values that it gives on."""
        code, before = self.code, self.code.block
        head, inside, after = (self.function.append_basic_block() for _ in range(3))
        code.branch(head)
        code.position_at_end(head)
        at = code.phi(self.word)
        at.add_incoming(first, before)
        held = [code.phi(value.type) for value in carried]
        for phi, value in zip(held, carried, strict=True):
            phi.add_incoming(value, before)
        code.cbranch(code.icmp_unsigned("<", at, last), inside, after)
        code.position_at_end(inside)
        made = body(at, held)
        at.add_incoming(code.add(at, self.number(step)), code.block)
        for phi, value in zip(held, made, strict=True):
            phi.add_incoming(value, code.block)
        code.branch(head)
        code.position_at_end(after)
        return held

    def load(self, base: Any, place: Any, kind: Any, count: int = 0) -> Any:
        found = self.code.load(
            self.code.gep(base, [place], source_etype=kind),
            typ=ir.VectorType(kind, count) if count else kind,
        )
        found.align = 1 if kind == self.byte else 2 if kind != self.float else 4
        return found

    def load_shares(self, base: Any, place: Any) -> Any:
        found = self.load(base, place, self.share, LANES)
        return found if self.share == self.float else self.code.fpext(found, self.floats)

    def spread(self, one: Any) -> Any:
        """One number in all lanes."""
        empty = ir.Constant(self.floats, ir.Undefined)
        placed = self.code.insert_element(empty, one, ir.Constant(ir.IntType(32), 0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        return self.code.shuffle_vector(placed, empty, zeros)

    def number(self, value: int) -> Any:
        return ir.Constant(self.word, value)
