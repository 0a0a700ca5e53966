"""TTGIR, Triton's code for a GPU before LLVM, as a program: operations, what runs behind each, and where values come from."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any, NamedTuple

NAME = re.compile(r"%[\w.$-]+(?:#\d+)?")
DEFINED = re.compile(r"%[\w.$-]+(?=:)")
PAIR = re.compile(r"(%[\w.$-]+) = (%[\w.$-]+(?:#\d+)?)")
OPERATION = re.compile(r'(?:(%[\w.$-]+(?:, %[\w.$-]+)*)(?::(\d+))? = )?"?([a-z_]+\.[\w.]+)"?(.*)')
STRING = re.compile(r'"[^"]*"')
PLACE = re.compile(r' loc\((?:#loc\d*|"[^"]*"\(#loc\d*\))\)')
ALIAS = re.compile(r"#loc\d*")
LINE = re.compile(r'([\w.-]+)":(\d+):')
LOOPS, REDUCTIONS = ("scf.for", "scf.while"), ("tt.reduce", "tt.scan")


class Operation(NamedTuple):
    """One operation. Values are numbers. ``after`` are the operations that may run next, ``place`` is FILE:LINE of the source."""

    name: str
    operands: list[int]
    results: list[int]
    types: str
    place: str
    after: set[int]


class Program:
    """The kernel of a TTGIR module.

    Attributes:
        operations: in the order of the text.
        arguments: value -> name, of the kernel's arguments.
        constants: value -> number, of integer constants.
        maker: value -> the operation that makes it.
        sources: value -> the values that it may be, for one that a loop or a branch hands on.
    """

    def __init__(self, text: str) -> None:
        self.operations: list[Operation] = []
        self.arguments: dict[int, str] = {}
        self.constants: dict[int, int] = {}
        self.maker: dict[int, int] = {}
        self.sources: defaultdict[int, set[int]] = defaultdict(set)
        self._names: dict[str, list[int]] = {}
        self._count = 0
        self._last: set[int] = set()  # the operations that the next one comes behind
        self._regions: list[dict[str, Any]] = []
        self._labels: dict[str, int] = {}
        self._jumps: list[tuple[int, str]] = []
        self._places = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.M))
        for line in text.splitlines():
            self._read(PLACE.sub("", line.strip()), line)
        for jump, label in self._jumps:
            self.operations[jump].after.add(self._labels[label])

    def _define(self, name: str, number: int = 1) -> list[int]:
        self._names[name] = list(range(self._count, self._count + number))
        self._count += number
        return self._names[name]

    def _values(self, text: str) -> list[int]:
        """The values that ``text`` names. All visible names differ, so of several definitions the last one is meant."""
        parts = (name.partition("#") for name in NAME.findall(STRING.sub("", text)))
        return [self._names[name][int(number or 0)] for name, _, number in parts]

    def _flow(self, sources: list[int], targets: list[int]) -> None:
        if len(sources) != len(targets):
            raise ValueError(f"TTGIR: {len(sources)} values become {len(targets)}, expected as many; teach tests/ttgir.py this form")
        for source, target in zip(sources, targets):
            self.sources[target].add(source)

    def _place(self, line: str) -> str:
        """Of a function that is inlined, the place in that function."""
        text = (PLACE.findall(line) or [""])[-1]
        while not (found := LINE.search(text)) and (alias := ALIAS.search(text)):
            text = self._places[alias[0]]
        return ":".join(found.groups()) if found else "an unknown line"

    def _read(self, line: str, located: str) -> None:
        if line.startswith("tt.func"):
            self.arguments = {self._define(name)[0]: name[1:] for name in DEFINED.findall(line)}
        elif line.startswith("^"):
            self._begin_block(line)
        elif line.startswith("}") and self._regions:
            self._end(line)
        elif found := OPERATION.fullmatch(line):
            result, number, name, rest = found.groups()
            control = self._begin if name in (*LOOPS, "scf.if") else self._yield if name.startswith("scf.") else self._plain
            control(name, rest, (result, int(number or 1)), self._place(located))

    def _add(self, name: str, operands: list[int], results: list[int], place: str, types: str = "") -> int:
        number = len(self.operations)
        self.operations.append(Operation(name, operands, results, types, place, set()))
        self.maker |= dict.fromkeys(results, number)
        for before in self._last:
            self.operations[before].after.add(number)
        self._last = {number}
        return number

    def _plain(self, name: str, rest: str, result: tuple[str | None, int], place: str) -> None:
        operands, names = self._values(rest), result[0].split(", ") if result[0] else []
        results = [value for each in names for value in self._define(each, result[1])]
        number = self._add(name, operands, results, place, rest.rpartition(" : ")[2])
        if name == "arith.constant" and (value := re.match(r" (-?\d+) : ", rest)):
            self.constants[results[0]] = int(value[1])
        elif name in REDUCTIONS:
            self._regions.append({"kind": name})
        elif name in ("cf.br", "cf.cond_br", "tt.return"):
            self._jumps += [(number, label) for label in re.findall(r"\^bb\d+", rest)]
            self._last = set()

    def _begin_block(self, line: str) -> None:
        """A block of a region, or one of the kernel that is jumped to."""
        values = [self._define(name)[0] for name in DEFINED.findall(line)]
        if not self._regions:
            self._flow([], values)
            self._last = set()
            self._labels[line.partition(":")[0]] = self._add("a label", [], [], "")
        elif self._regions[-1]["kind"] == "scf.while":
            self._flow(self._regions[-1]["handed"], values)

    def _begin(self, name: str, rest: str, result: tuple[str | None, int], place: str) -> None:
        """A loop or a branch: an operation that decides, and a region behind it."""
        head, _, given = rest.partition({"scf.for": "iter_args", "scf.while": "(", "scf.if": "->"}[name])
        pairs = [] if name == "scf.if" else PAIR.findall(given)
        counter, equals, bounds = head.partition(" = ")
        number = self._add(name, self._values(bounds if equals else head), [], place)
        initial = [self._values(value)[0] for _, value in pairs]
        results = self._define(result[0], result[1]) if result[0] else []
        if name == "scf.for":
            self._define(counter.strip())
            self._flow(initial, results)
        carried = [self._define(inner)[0] for inner, _ in pairs]
        self._flow(initial, carried)
        self._regions.append({"kind": name, "number": number, "results": results, "carried": carried, "ends": {number}})

    def _yield(self, name: str, rest: str, result: tuple[str | None, int], place: str) -> None:
        """The end of a region, which hands values on."""
        region, values = self._regions[-1], self._values(rest)
        if name == "scf.condition":
            self._add(name, values[:1], [], place)
            region["handed"] = values[1:]
            self._flow(values[1:], region["results"])
        elif name == "scf.yield":
            if region["kind"] != "scf.while":
                self._flow(values, region["results"])
            if region["kind"] in LOOPS:
                self._flow(values, region["carried"])
        else:
            raise ValueError(f"TTGIR: {name} at {place} is unknown; teach tests/ttgir.py how control flows")

    def _end(self, line: str) -> None:
        region = self._regions[-1]
        if line.startswith("} else"):
            region["ends"], self._last = self._last, {region["number"]}
        elif line.startswith("} do"):
            region["ends"] = self._last
        else:
            self._regions.pop()
            if region["kind"] == "scf.if":
                self._last = self._last | region["ends"]
            elif region["kind"] in LOOPS:
                for last in self._last:
                    self.operations[last].after.add(region["number"])
                self._last = region["ends"]
