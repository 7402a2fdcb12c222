"""Values and calls between a test and the program that it tests, which run in two processes.

    test                                            program
    channel.call("add", [1, 2])      ---->          add(1, 2)
                                     <----          {"value": 3}  or  {"error": ["TypeError", "..."]}

The program may be hostile, so nothing that it sends is evaluated, and an answer is made of plain values only: a program
cannot return an object that claims to equal everything. An object of any other class stays where it is, and the test
gets a `Remote` with its number. Pickle would do none of this.
"""

import builtins
import functools
import json
import socket
from collections import deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

MOST_BYTES = 16 * 2**20  # of one message
SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
NUMBERS = {"Decimal": Decimal, "Fraction": Fraction}


class Ended(BaseException):
    """The other process has ended, or sends nonsense. No `except Exception` of a test hides it."""


class Channel:
    """One end of the connection between a test and its program."""

    def __init__(self, fd: int, names: dict[str, Any] | None = None):
        """names: what the other side may call by name. Without them it may only call functions that it was given."""
        self.socket = socket.socket(fileno=fd)
        self.names = names
        self.objects: list[Any] = []  # objects of this side that the other side knows by their number

    def send(self, message: dict) -> None:
        data = json.dumps(message).encode()
        try:
            self.socket.sendall(len(data).to_bytes(4, "big") + data)
        except OSError:
            raise Ended from None

    def receive(self) -> dict:
        size = int.from_bytes(self.read(4), "big")
        if size > MOST_BYTES:
            raise Ended(f"a message of {size} bytes")
        try:
            message = json.loads(self.read(size))
        except (ValueError, RecursionError):
            raise Ended("a message that is not JSON") from None
        if not isinstance(message, dict):
            raise Ended("a message of no known form")
        return message

    def read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                part = self.socket.recv(count - len(data))
            except OSError:
                part = b""
            if not part:
                raise Ended
            data += part
        return bytes(data)

    def call(self, name: str | int, arguments: list, keywords: dict | None = None, method: str = "") -> Any:
        """Call a function of the other side by its name, or an object by its number, or a method of it.

        Meanwhile the other side may call back. Raises the exception that the function raises.
        """
        self.send({"call": name, "method": method, "arguments": self.pack([arguments, keywords or {}])})
        while True:
            answer = self.receive()
            if "call" not in answer:
                break
            self.answer(answer)
        if "error" in answer:
            error = exception(answer["error"])
            # It would end map() and others early, and with them the assertions that are left: all(map(f, [])) is true.
            if isinstance(error, StopIteration | StopAsyncIteration) and method != "__next__":
                error = RuntimeError(f"{type(error).__name__}: {error}")
            raise error
        # Functions that sort a list in place changed a copy of it.
        if answer.get("arguments"):
            changed = self.unpack(answer["arguments"])
            for ours, theirs in zip(arguments, changed if isinstance(changed, list) else []):
                update(ours, theirs)
        return self.unpack(answer.get("value"))

    def answer(self, request: dict) -> None:
        """Do what call() of the other side asks for."""
        try:
            arguments, keywords = self.unpack(request["arguments"])
            name, method = request["call"], request["method"]
            # Attributes of a test's function lead to everything that the test knows.
            if self.names is None and (method or not isinstance(name, int)):
                raise Ended("a call of something that was not given")
            target = self.objects[name] if isinstance(name, int) else self.names[name]
            if method in ("getattr", "setattr"):
                target = functools.partial(getattr(builtins, method), target)
            elif method:
                target = getattr(target, method)
            value = target(*arguments, **keywords)
            reply = {"value": self.pack(value)}
            after = self.pack(arguments)
            if after != request["arguments"][1][0]:
                reply["arguments"] = after
        except Ended:
            raise
        except BaseException as error:  # SystemExit, too: the test decides what an exception means
            reply = {"error": [name_of(error), str(error)[:300]]}
        self.send(reply)

    def pack(self, value: Any) -> Any:
        """The value as JSON."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, Remote):
            return ["yours", value._name]
        if isinstance(value, str):
            return str(value)
        # numpy's numbers
        if type(value).__module__ == "numpy" and not getattr(value, "shape", True):
            value = value.item()
        if isinstance(value, bool):
            return value
        if isinstance(value, int):
            # JSON would write a large number in decimal digits, of which Python reads 4,300.
            return int(value) if abs(value) < 2**63 else ["int", hex(value)]
        if isinstance(value, float):
            return float(value)
        if isinstance(value, complex):
            return ["complex", value.real, value.imag]
        if isinstance(value, bytes | bytearray):
            return ["bytes", bytes(value).hex()]
        if isinstance(value, range):
            return ["range", value.start, value.stop, value.step]
        if isinstance(value, dict):
            return ["dict", [[self.pack(key), self.pack(entry)] for key, entry in value.items()]]
        for name, kind in SEQUENCES.items():
            if isinstance(value, kind):
                return [name, [self.pack(entry) for entry in value]]
        for name, kind in NUMBERS.items():
            if isinstance(value, kind):
                return [name, str(value)]
        self.objects.append(value)
        return ["own", len(self.objects) - 1]

    def unpack(self, packed: Any) -> Any:
        """The value of pack() on the other side. Raises Ended on anything else."""
        if packed is None or isinstance(packed, bool | int | float | str):
            return packed
        try:
            kind, *rest = packed
            if kind == "int":
                return int(rest[0], 16)
            if kind == "complex":
                return complex(*rest)
            if kind == "bytes":
                return bytes.fromhex(rest[0])
            if kind == "range":
                return range(*rest)
            if kind == "dict":
                return {self.unpack(key): self.unpack(entry) for key, entry in rest[0]}
            if kind in SEQUENCES:
                return SEQUENCES[kind](self.unpack(entry) for entry in rest[0])
            if kind in NUMBERS:
                return NUMBERS[kind](rest[0])
            if kind == "own":
                return Remote(self, rest[0])
            if kind == "yours" and isinstance(rest[0], int):
                return self.objects[rest[0]]
            if kind == "yours" and self.names is not None:
                return self.names[rest[0]]
        except (KeyError, ValueError, TypeError, IndexError, ArithmeticError, RecursionError):
            raise Ended("a value of no known form") from None
        raise Ended("a value of no known form")


class Remote:
    """A function or an object of the other process: it can be called, asked for methods, and iterated.

    It compares by identity, and its truth is that of any object: what it is equal to is not for the program to say.
    """

    def __init__(self, channel: Channel, name: str | int):
        vars(self).update(_channel=channel, _name=name)

    def __call__(self, *arguments, **keywords):
        return self._channel.call(self._name, list(arguments), keywords)

    def __getattr__(self, attribute: str):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return self._channel.call(self._name, [attribute], {}, "getattr")

    def __setattr__(self, attribute: str, value):
        self._channel.call(self._name, [attribute, value], {}, "setattr")

    def __getitem__(self, key):
        return self._channel.call(self._name, [key], {}, "__getitem__")

    def __len__(self):
        try:
            return self._channel.call(self._name, [], {}, "__len__")
        except AttributeError:  # list() of a generator asks, and expects this error
            raise TypeError("object has no len()") from None

    def __bool__(self):
        return True

    def __iter__(self):
        iterator = self._channel.call(self._name, [], {}, "__iter__")
        while True:
            try:
                yield self._channel.call(iterator._name, [], {}, "__next__")
            except StopIteration:
                return

    def __next__(self):
        return self._channel.call(self._name, [], {}, "__next__")


def name_of(error: BaseException) -> str:
    """The nearest of Python's own classes: a JSONDecodeError is a ValueError. Without one the name of its class."""
    own = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return type(error).__name__ if own in (Exception, BaseException) else own.__name__


def exception(described: list) -> BaseException:
    """The exception of the other side: one of Python's own, or a RuntimeError that names the class."""
    name, message = map(str, described)
    kind = getattr(builtins, name, None)
    if kind in (UnicodeDecodeError, UnicodeEncodeError):  # they want more than a message
        return kind("utf-8", b"" if kind is UnicodeDecodeError else "", 0, 1, message)
    if isinstance(kind, type) and issubclass(kind, Exception | SystemExit):
        return kind(message)
    return RuntimeError(f"{name}: {message}")


def update(ours: Any, theirs: Any) -> None:
    """Change a list, set or dict in place into what the function has made of its copy."""
    if isinstance(ours, list | bytearray) and isinstance(theirs, list | bytes):
        ours[:] = theirs
    elif isinstance(ours, set | dict) and type(theirs) is type(ours):
        ours.clear()
        ours.update(theirs)
