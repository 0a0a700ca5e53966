"""Hazards: memory that a thread of a program may write before another one has read it, or read before another one has written it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from ttgir import Operation, Program

BARRIERS = ("ttg.barrier all", "gpu.barrier")
READS, WRITES = ("tt.load", "ttg.async_copy_global_to_local"), ("tt.store", "tt.atomic_rmw", "tt.atomic_cas")
MOVES = ("tt.addptr", "tt.splat", "tt.broadcast", "tt.bitcast", "tt.expand_dims", "tt.reshape", "tt.trans", "ttg.convert_layout")
CHOICES = ("arith.select", "scf.for", "scf.if", "scf.while", "scf.condition")


class Hazard(NamedTuple):
    """``first`` and ``second`` are each "reads" or "writes", and FILE:LINE. They come in this order, and no barrier stands between."""

    argument: str
    first: tuple[str, str]
    second: tuple[str, str]


class _Accesses:
    def __init__(self, program: Program, same: Iterable[set[str]]) -> None:
        self.program, self.operations = program, program.operations
        self.users, self.targets = defaultdict(list), defaultdict(list)
        self.same: dict[str, set[str]] = {}
        for names in same:
            joined = names.union(*(self.same.get(name, ()) for name in names))
            self.same |= dict.fromkeys(joined, joined)
        for operation in self.operations:
            for value in operation.operands:
                self.users[value].append(operation)
            if "!tt.ptr" in operation.types and operation.name not in (*READS, *WRITES, *MOVES, *CHOICES, "tt.int_to_ptr"):
                raise ValueError(f"{operation.name} at {operation.place} has a pointer; teach tests/hazards.py what it does with it")
        for target, sources in program.sources.items():
            for source in sources:
                self.targets[source].append(target)

    def memory(self, pointer: int) -> set[str]:
        """Arguments whose memory a pointer may point to."""
        found, seen, todo = set(), set(), [pointer]
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            if value in self.program.arguments:
                name = self.program.arguments[value]
                found.add(min(self.same.get(name, {name})))
            elif value in self.program.sources:
                todo += self.program.sources[value]
            else:
                maker = self.operations[self.program.maker[value]]
                if maker.name == "tt.int_to_ptr":
                    found.add(f"an address at {maker.place}")
                elif maker.name in (*MOVES, "arith.select"):
                    todo += maker.operands[:1] if maker.name in MOVES else maker.operands[1:]
                else:
                    raise ValueError(f"{maker.name} at {maker.place} makes a pointer; teach tests/hazards.py where it points")
        return found

    def element(self, pointer: int) -> tuple[int, int] | None:
        """The argument and the number of its element that a pointer points to, if the number is a constant."""
        number = 0
        while pointer not in self.program.arguments:
            maker = self.operations[self.program.maker[pointer]] if pointer in self.program.maker else None
            if maker is None or maker.name != "tt.addptr" or maker.operands[1] not in self.program.constants:
                return None
            pointer, number = maker.operands[0], number + self.program.constants[maker.operands[1]]
        return pointer, number

    def serves_one_thread(self, read: Operation) -> bool:
        """Whether a scalar that was read only becomes a part of scalars that are written, which one thread does."""
        seen, todo = set(), [*read.results]
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            todo += self.targets[value]
            for user in self.users[value]:
                if user.name.startswith("arith.") and is_scalar(user):
                    todo += user.results
                elif user.name not in WRITES or not is_scalar(user):
                    return False
        return True

    def reached(self, number: int) -> set[int]:
        """Operations that may run behind one, with no barrier between. An asynchronous copy reads behind barriers, too."""
        seen, todo = set(), [*self.operations[number].after]
        asynchronous = self.operations[number].name == READS[1]
        while todo:
            behind = todo.pop()
            operation = self.operations[behind]
            if behind not in seen and (asynchronous or not f"{operation.name}{operation.types}".startswith(BARRIERS)):
                seen.add(behind)
                todo += operation.after
        return seen

    def may_meet(self, one: Operation, other: Operation) -> bool:
        """Whether different threads may read and write the same element, if the memory is the same."""
        if not (is_scalar(one) and is_scalar(other)):
            return True
        (one_of, number), (other_of, other_number) = (self.element(operation.operands[0]) or (None, 0) for operation in (one, other))
        different = one_of is not None and one_of == other_of and number != other_number
        return not different and not self.serves_one_thread(one if one.name in READS else other)


def is_scalar(operation: Operation) -> bool:
    return "tensor<" not in operation.types


def hazards(program: Program, same: Iterable[set[str]] = ()) -> set[Hazard]:
    """The hazards of a kernel. ``same`` are sets of arguments that share memory."""
    accesses = _Accesses(program, same)
    memory = {n: accesses.memory(op.operands[0]) for n, op in enumerate(program.operations) if op.name in READS + WRITES}
    found = set()
    for first in memory:
        one, reached = program.operations[first], accesses.reached(first)
        for second in memory.keys() & reached:
            other = program.operations[second]
            if (one.name in READS) != (other.name in READS) and accesses.may_meet(one, other):
                kinds = [("reads" if op.name in READS else "writes", op.place) for op in (one, other)]
                found |= {Hazard(argument, *kinds) for argument in memory[first] & memory[second]}
    return found
