"""Modules whose forward reads Python state, from a grammar: what a compiler has to ask again in each call.

A program is a holder (where a value lives) x a use (what it does to a tensor) x a way (how the forward comes to it)
x a write (how it is changed between calls), or a mover: state that moves when it is read. `Program.module()` has
`Middle`, a module from [..., 4 * width] to the same, `change(module)` and `state(module)`.
"""

from __future__ import annotations

import itertools
import linecache
import sys
import types
from dataclasses import dataclass

HEAD = """
import collections, contextvars, enum, functools, itertools, os, random, types
from dataclasses import dataclass, field
import numpy
import torch
from torch import nn
from torch.nn import functional as F

class Mode(enum.Enum):
    A = 0
    B = 1

class StrMode(str, enum.Enum):
    A = "a"
    B = "b"

def relu(x):
    return torch.relu(x)

def centred(x):
    return x - x.mean(-1, keepdim=True)

class Config:
    pass

class Slots:
    __slots__ = ("v",)

@dataclass
class Data:
    v: object

@dataclass(frozen=True)
class Frozen:
    v: object

class Named(collections.namedtuple("Named", "v")):
    pass

class Reads:
    def __init__(self, name):
        self.name = name
    def __get__(self, one, kind=None):
        return self if one is None else one.__dict__[self.name]

class Inner:
    def __init__(self, v):
        self.v = v

TABLE, G, CELL = {}, None, None

def box(value):
    def get():
        return value
    return get

def set_cell(get, value):
    get.__closure__[0].cell_contents = value
"""

# use -> (statements on x and v, the value before, the value after). The last dim of x is sharded.
USES = {
    "a factor": ("x * v", "2.0", "3.0"),
    "a factor of zero": ("x * v if v else x - x.mean(-1, keepdim=True)", "0.5", "0.0"),
    "a probability": ("F.dropout(x, v, self.training)", "0.0", "0.5"),
    "a dim": ("x.softmax(v)", "1", "-1"),
    "a pad": ("F.pad(x, (v, 0)).sum(-1, keepdim=True) + x", "0", "2"),
    "a width of a pad in another dim": ("F.pad(x, (0, 0, v, 0))[:, -3:] + x", "0", "1"),
    "a size": ("x.unflatten(-1, (-1, v)).softmax(-1).flatten(-2)", "2", "16"),
    "a bound": ("torch.cat([x[..., :v] * 2, x[..., v:]], -1)", "0", "3"),
    "a flag": ("centred(x) if v else x * 2", "False", "True"),
    "an index": ("x + x[:, v:v + 1]", "0", "1"),
    "an index of a sharded dim": ("x + (x[..., v].unsqueeze(-1) if v is not None else 0)", "None", "3"),
    "a dtype": ("x.to(v).float().tanh()", "torch.float32", "torch.bfloat16"),
    "a mode": ("x.tanh() if v == 'a' else centred(x)", "'a'", "'b'"),
    "a member": ("x.tanh() if v is Mode.A else centred(x)", "Mode.A", "Mode.B"),
    "a member that is a string": ("x.tanh() if v == 'a' else centred(x)", "StrMode.A", "StrMode.B"),
    "a function": ("v(x)", "relu", "centred"),
    "a name of a function": ("getattr(x, v)(-1, keepdim=True) + x if v != 'tanh' else x.tanh()", "'tanh'", "'mean'"),
    "a count": ("sum([x] * v) if v < 3 else centred(x)", "1", "3"),
    "a tuple": ("x.sum(v, keepdim=True) + x", "(1,)", "(-1,)"),
    "a keyword": ("x.softmax(**v)", "{'dim': 1}", "{'dim': -1}"),
}

# holder -> (statements in __init__ with V for the value, how it is read, statements that write W). `m` is the module.
HOLDERS = {
    "an attribute": ("self.v = V", "self.v", "m.v = W"),
    "a private attribute": ("self._v = V", "self._v", "m._v = W"),
    "a config": ("self.c = Config(); self.c.v = V", "self.c.v", "m.c.v = W"),
    "a config replaced": ("self.c = Inner(V)", "self.c.v", "m.c = Inner(W)"),
    "a config deep down": ("self.c = Inner(Inner(Inner(V)))", "self.c.v.v.v", "m.c.v.v = Inner(W)"),
    "a dict": ("self.d = {'v': V}", "self.d['v']", "m.d['v'] = W"),
    "a dict's get": ("self.d = {'v': V}", "self.d.get('v')", "m.d.update(v=W)"),
    "a dict's default": ("self.d = {'w': 0} if True else V", "self.d.get('v', V)", "m.d['v'] = W"),
    "a list": ("self.d = [0, V]", "self.d[1]", "m.d[1] = W"),
    "a list's end": ("self.d = [V]", "self.d[-1]", "m.d.append(W)"),
    "a tuple": ("self.d = (0, V)", "self.d[-1]", "m.d = (0, W)"),
    "a dict in a list in a tuple": ("self.d = ([{'v': V}],)", "self.d[0][0]['v']", "m.d[0][0]['v'] = W"),
    "a dataclass": ("self.c = Data(V)", "self.c.v", "m.c.v = W"),
    "a frozen dataclass": ("self.c = Frozen(V)", "self.c.v", "object.__setattr__(m.c, 'v', W)"),
    "a frozen dataclass replaced": ("self.c = Frozen(V)", "self.c.v", "m.c = Frozen(W)"),
    "a named tuple": ("self.c = Named(V)", "self.c.v", "m.c = m.c._replace(v=W)"),
    "a namespace": ("self.c = types.SimpleNamespace(v=V)", "self.c.v", "m.c.v = W"),
    "slots": ("self.c = Slots(); self.c.v = V", "self.c.v", "m.c.v = W"),
    "the class": ("type(self).v = V", "self.v", "type(m).v = W"),
    "the class, shadowed": ("type(self).v = V", "self.v", "m.v = W"),
    "the class by name": ("Middle.v = V", "Middle.v", "Middle.v = W"),
    "a base class": ("Base.v = V", "self.v", "Base.v = W"),
    "a base class, overridden": ("Base.v = V", "self.v", "Middle.v = W"),
    "another class": ("Config.v = V", "Config.v", "Config.v = W"),
    "a global": ("globals().update(G=V)", "G", "globals().update(G=W)"),
    "a global dict": ("TABLE['v'] = V", "TABLE['v']", "TABLE['v'] = W"),
    "a global of another module": ("types.spare = V", "types.spare", "types.spare = W"),
    "a cell": ("globals().update(CELL=box(V))", "CELL()", "set_cell(CELL, W)"),
    "a default": ("default.__defaults__ = (V,)", "default()", "default.__defaults__ = (W,)"),
    "a keyword default": ("named.__kwdefaults__ = {'v': V}", "named()", "named.__kwdefaults__['v'] = W"),
    "a function's attribute": ("default.v = V", "default.v", "default.v = W"),
    "a property": ("self._v = V", "self.prop", "m._v = W"),
    "a descriptor": ("self.v_of_it = V", "self.described", "m.v_of_it = W"),
    "another descriptor": ("self._a, self._b = V, W", "self.named", "type(m).named.name = '_b'"),
    "__getattr__": ("self.d = {'v': V}", "self.from_getattr", "m.d['v'] = W"),
    "a partial": ("self.p = functools.partial(same, V)", "self.p()", "m.p = functools.partial(same, W)"),
    "a partial's keyword": ("self.p = functools.partial(same, v=V)", "self.p()", "m.p.keywords['v'] = W"),
    "a bound method": ("self.p = Inner(V)", "get_v(self.p)", "m.p.v = W"),
    "a lambda": ("self.p = lambda: V", "self.p()", "m.p = lambda: W"),
    "code": ("self.p = code_a", "V if self.p() else W", "code_a.__code__ = code_b.__code__"),
    "another class of the module": ("pass", "self.kind_v(V, W)", "m.__class__ = Other"),
    "a method of the object": ("pass", "self.kind_v(V, W)", "m.kind_v = lambda v, w: w"),
    "a method of the class": ("pass", "self.kind_v(V, W)", "type(m).kind_v = lambda self, v, w: w"),
    "the environment": ("os.environ['SPARE'] = ''", "W if os.environ.get('SPARE') else V", "os.environ['SPARE'] = '1'"),
    "a context variable": ("VAR.set(V)", "VAR.get()", "VAR.set(W)"),
    "the order of a dict": ("self.d = {V: 0, W: 1}", "next(iter(self.d))", "m.d[V] = m.d.pop(V)"),
    "a set": ("self.d = set()", "W if 1 in self.d else V", "m.d.add(1)"),
    "a length": ("self.d = []", "W if len(self.d) else V", "m.d.append(1)"),
    "a truth": ("self.d = {}", "W if self.d else V", "m.d[1] = 1"),
    "hasattr": ("pass", "W if hasattr(self, 'spare') else V", "m.spare = 1"),
    "a child": ("self.child = nn.Identity(); self.child.v = V", "self.child.v", "m.child.v = W"),
    "a child's child": (
        "self.child = nn.Sequential(nn.Identity()); self.child[0].v = V",
        "self.child[0].v",
        "m.child[0].v = W",
    ),
    "a module outside": ("TABLE['m'] = nn.Identity(); TABLE['m'].v = V", "TABLE['m'].v", "TABLE['m'].v = W"),
    "vars": ("self.v = V", "vars(self)['v']", "m.v = W"),
    "two files": ("self.v = V", "getattr(self, 'v', None)", "m.v = W"),
    "the type's name": ("pass", "V if type(self).__name__ == 'Middle' else W", "m.__class__ = Other"),
    "training": ("pass", "V if self.training else W", "m.eval()"),
}

# way -> (definitions around the class, statements in the forward that set v). R is the read, on `self`.
WAYS = {
    "directly": ("", "v = R"),
    "by a local": ("", "one = self\n        self = one\n        v = R"),
    "one helper down": ("def h1(self):\n    return R\n", "v = h1(self)"),
    "two helpers down": (
        "def h1(self):\n    return R\ndef h2(one):\n    got = h1(one)\n    return got\n",
        "v = h2(self)",
    ),
    "three helpers down": (
        "def h1(self):\n    return R\ndef h2(*a):\n    return h1(*a)\ndef h3(**k):\n    return h2(k['one'])\n",
        "v = h3(one=self)",
    ),
    "by a method": ("", "v = self.method()"),
    "by a static method": ("", "v = self.static_method(self)"),
    "by a class method": ("", "v = self.class_method(self)"),
    "by a lambda": ("", "v = (lambda self: R)(self)"),
    "by a nested function": ("", "def inner():\n            return R\n        v = inner()"),
    "by a partial": ("def h1(a, self):\n    return R\n", "v = functools.partial(h1, 0)(self)"),
    "by a comprehension": ("", "v = [R for self in (self,)][0]"),
    "by map": ("def h1(self):\n    return R\n", "v = list(map(h1, [self]))[0]"),
    "by a generator": ("def h1(self):\n    yield R\n", "v = next(h1(self))"),
    "by a generator that is unpacked": ("", "v, _ = (R for self in (self, self))"),
    "by map, unpacked": ("def h1(self):\n    return R\n", "v, *_ = map(h1, (self, self))"),
    "by a generator that is kept": ("", "kept = (R for self in (self,))\n        v = next(kept)"),
    "by a dict of functions": ("def h1(self):\n    return R\nTABLE['h'] = h1\n", "v = TABLE['h'](self)"),
    "by a decorator": (
        "def deco(f):\n    @functools.wraps(f)\n    def w(*a, **k):\n        return f(*a, **k)\n    return w\n"
        "@deco\ndef h1(self):\n    return R\n",
        "v = h1(self)",
    ),
    "by try": ("", "try:\n            v = R\n        except AttributeError:\n            v = None"),
    "by a loop": ("", "v = None\n        for one in range(2):\n            v = R"),
}

WRITES = {  # other ways to write an attribute, in place of `m.name = W`
    "as written": "{0}.{1} = W",
    "__dict__": "{0}.__dict__['{1}'] = W",
    "setattr": "setattr({0}, '{1}', W)",
    "object.__setattr__": "object.__setattr__({0}, '{1}', W)",
    "vars": "vars({0}).update({1}=W)",
    "another __dict__": "{0}.__dict__ = {{**{0}.__dict__, '{1}': W}}",
}

BODY = """
def default(v=None):
    return v

def named(*, v=None):
    return v

def same(v):
    return v

def get_v(one):
    return one.v

def code_a():
    return True

def code_b():
    return False

VAR = contextvars.ContextVar("VAR")
{definitions}

class Base(nn.Module):
    v = None

class Middle(Base):
    described = Reads("v_of_it")
    named = Reads("_a")

    def __init__(self):
        super().__init__()
        {init}

    @property
    def prop(self):
        return self._v

    def __getattr__(self, name):
        if name == "from_getattr":
            return self.__dict__["d"]["v"]
        return super().__getattr__(name)

    def kind_v(self, v, w):
        return v

    def method(self):
        return {read}

    @staticmethod
    def static_method(self):
        return {read}

    @classmethod
    def class_method(cls, self):
        return {read}

    def forward(self, x):
        {way}
        return {use}

class Other(Middle):
    def kind_v(self, v, w):
        return w

def change(m):
    {change}

def state(m):
    return None
"""

# What moves when it is read: how it is made, read as a number in 0..9, and looked at without moving it.
MOVERS = {
    "an iterator": ("self.i = iter(range(10**6))", "next(self.i) % 10", "m.i.__reduce__()"),
    "a cycle": ("self.i = itertools.count()", "next(self.i)", "repr(m.i)"),
    "a deque": ("self.i = collections.deque(range(7)); self.r = lambda: (self.i.rotate(1), self.i[0])[1]", "self.r()",
                "list(m.i)"),
    "a deque's end": ("self.i = collections.deque(range(99))", "self.i.pop()", "list(m.i)"),
    "random.Random": ("self.i = random.Random(0)", "self.i.randrange(9)", "m.i.getstate()"),
    "random": ("random.seed(0)", "random.randrange(9)", "random.getstate()"),
    "numpy's generator": ("self.i = numpy.random.default_rng(0)", "int(self.i.integers(9))",
                          "m.i.bit_generator.state"),
    "numpy's old generator": ("self.i = numpy.random.RandomState(0)", "int(self.i.randint(9))",
                              "m.i.get_state()[2:]"),
    "a counter in an object": ("self.i = Counter()", "self.i.tick()", "m.i.n"),
    "a counter in the class": ("Counter.n = 0", "Counter.tick(Counter)", "Counter.n"),
    "a counter in a dict": ("self.i = collections.Counter()", "(self.i.update(a=1), self.i['a'])[1]", "dict(m.i)"),
    "a default dict": ("self.i = collections.defaultdict(int)", "self.i[len(self.i)]", "dict(m.i)"),
    "setdefault": ("self.i = {}", "self.i.setdefault(len(self.i), 1)", "dict(m.i)"),
    "a list": ("self.i = []", "(self.i.append(1), len(self.i))[1]", "list(m.i)"),
    "a list by +=": ("self.i = []", "grow(self.i)", "list(m.i)"),
    "a list by a slice": ("self.i = []", "grow_slice(self.i)", "list(m.i)"),
    "a global": ("globals().update(G=0)", "count_global()", "G"),
    "a cell": ("globals().update(CELL=ticker())", "CELL()", "CELL.__closure__[0].cell_contents"),
    "a function's attribute": ("count_on.n = 0", "count_on()", "count_on.n"),
    "a default that is a list": ("remember.__defaults__[0].clear()", "remember()", "list(remember.__defaults__[0])"),
    "a cache": ("cached.cache_clear()", "cached(int(x.shape[0]))", "tuple(cached.cache_info())"),
    "a context variable": ("VAR.set(0)", "(VAR.set(VAR.get() + 1), VAR.get())[1]", "VAR.get()"),
    "the environment": ("os.environ['SPARE'] = '0'",
                        "(os.environ.update(SPARE=str(int(os.environ['SPARE']) + 1)), 1)[1]",
                        "os.environ['SPARE']"),
    "setattr": ("self.i = Config(); self.i.n = 0", "(setattr(self.i, 'n', self.i.n + 1), self.i.n)[1]", "m.i.n"),
    "object.__setattr__": ("self.i = Frozen(0)", "(object.__setattr__(self.i, 'v', self.i.v + 1), 1)[1]", "m.i.v"),
    "__dict__": ("self.i = Config(); self.i.n = 0", "(self.i.__dict__.update(n=self.i.n + 1), 1)[1]", "m.i.n"),
    "a property that counts": ("self.i = CountingProperty()", "self.i.value", "m.i.n"),
    "__getattr__ that counts": ("self.i = CountingGetattr()", "self.i.value", "m.i.n"),
    "__len__ that counts": ("self.i = CountingLen()", "len(self.i)", "m.i.n"),
    "__bool__ that counts": ("self.i = CountingLen()", "(1 if self.i else 0)", "m.i.n"),
    "__eq__ that counts": ("self.i = CountingLen()", "int(self.i == 3)", "m.i.n"),
    "__mul__ that counts": ("self.i = CountingLen()", "self.i * 2", "m.i.n"),
    "__format__ that counts": ("self.i = CountingLen()", "len(f'{self.i}')", "m.i.n"),
    "__iter__ that counts": ("self.i = CountingLen()", "sum(self.i)", "m.i.n"),
    "__hash__ that counts": ("self.i = CountingLen()", "len({self.i: 1})", "m.i.n"),
    "a context manager": ("self.i = CountingLen()", "within(self.i)", "m.i.n"),
    "a finished list": ("self.i = [0]", "(self.i.sort(key=lambda a: self.i2.append(1)), 1)[1]" , "m.i2"),
    "a weak dict": ("self.i = Config(); TABLE.clear()", "TABLE.setdefault(len(TABLE), 2)", "dict(TABLE)"),
    "a bound method": ("self.i = []; self.f = self.i.append", "(self.f(1), 1)[1]", "list(m.i)"),
    "a partial": ("self.i = []; self.f = functools.partial(self.i.append, 1)", "(self.f(), 1)[1]", "list(m.i)"),
    "map": ("self.i = []", "len(list(map(self.i.append, [1])))", "list(m.i)"),
    "a set": ("self.i = set()", "(self.i.add(len(self.i)), 1)[1]", "set(m.i)"),
    "an attribute of the input": ("self.i = []", "mark(x, self.i)", "len(m.i)"),
}  # fmt: skip

MOVER_HEAD = """
class Counter:
    n = 0
    def tick(self):
        self.n += 1
        return self.n

def grow(one):
    one += [1]
    return len(one)

def grow_slice(one):
    one[len(one):] = [1]
    return len(one)

def count_global():
    global G
    G += 1
    return G

def ticker():
    n = 0
    def tick():
        nonlocal n
        n += 1
        return n
    return tick

def count_on():
    count_on.n += 1
    return count_on.n

def remember(kept=[]):
    kept.append(1)
    return len(kept)

@functools.lru_cache
def cached(n):
    return n

class CountingProperty:
    n = 0
    @property
    def value(self):
        self.n += 1
        return self.n

class CountingGetattr:
    def __init__(self):
        self.n = 0
    def __getattr__(self, name):
        self.__dict__["n"] += 1
        return self.__dict__["n"]

class CountingLen:
    n = 0
    def count(self, *_):
        self.n += 1
        return self.n
    __len__ = __eq__ = __mul__ = __hash__ = __enter__ = __exit__ = count
    def __format__(self, spec):
        return "x" * self.count()
    def __iter__(self):
        return iter([self.count()])

def within(one):
    with one as n:
        return n

def mark(x, kept):
    if not hasattr(x, "marked_by_it"):
        x.marked_by_it = 1
    return x.marked_by_it
"""

MOVED_USES = {
    "a factor": "x * (v + 1.0)",
    "a branch": "x * 2 if v % 2 else x - x.mean(-1, keepdim=True)",
    "a draw now and then": "F.dropout(x, 0.5 if v % 3 == 2 else 0.0, self.training)",
    "nothing": "x * 2",
}


_numbers = itertools.count()


@dataclass(frozen=True)
class Program:
    """One program: its name and its source."""

    name: str
    source: str

    def module(self) -> types.ModuleType:
        """Returns the program as a module of its own, its source where `inspect` finds it."""
        file = f"<python state: {self.name}>"
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(True), file)
        name = f"program_{next(_numbers)}"
        made = sys.modules[name] = types.ModuleType(name)  # where compilers look for it
        exec(compile(self.source, file, "exec", dont_inherit=True), made.__dict__)
        return made


def program(holder: str, use: str, way: str, write: str = "as written") -> Program:
    """Returns the program of these."""
    init, read, change = HOLDERS[holder]
    body, before, after = USES[use]
    definitions, into = WAYS[way]
    if write != "as written":
        place, name = change.split(" = ")[0].rsplit(".", 1)
        change = WRITES[write].format(place, name)

    def filled(text: str) -> str:
        text = text.replace("R", f"({read})") if text in (definitions, into) else text
        return _words(text, {"V": before, "W": after})

    source = HEAD + BODY.format(
        definitions=filled(definitions), init=filled(init), read=filled(read), way=filled(into), use=body,
        change=filled(change),
    )  # fmt: skip
    return Program(f"{use} in {holder}, {way}, {write}", source)


def _words(text: str, values: dict[str, str]) -> str:
    """Returns `text` with the words V and W replaced."""
    for word, value in values.items():
        out, at = "", 0
        while at < len(text):
            alone = text[at] == word and not (text[at - 1 : at].isidentifier() or text[at - 1 : at] in ("'", '"', "."))
            alone = alone and not (text[at + 1 : at + 2].isidentifier() or text[at + 1 : at + 2].isdigit())
            out, at = out + (value if alone else text[at]), at + 1
        text = out
    return text


def moving(mover: str, use: str, way: str) -> Program:
    """Returns the program of these, whose state moves when it is read."""
    init, read, look = MOVERS[mover]
    definitions, into = WAYS[way]
    definitions = (
        definitions.replace("R", f"({read})").replace("(self)", "(self, x)")
        if "x." in read
        else (definitions.replace("R", f"({read})"))
    )
    source = HEAD + MOVER_HEAD + BODY.format(
        definitions=definitions, init=init + "; self.i2 = []", read=read, way=into.replace("R", f"({read})"),
        use=MOVED_USES[use], change="pass",
    ).replace("def state(m):\n    return None", f"def state(m):\n    return repr({look})")  # fmt: skip
    return Program(f"{use} by {mover} that moves, {way}", source)


def python_state_programs() -> list[Program]:
    """Returns every holder with every way, every use with every way, every write; uses and ways take turns."""
    uses, ways = itertools.cycle(USES), itertools.cycle(WAYS)
    made = {}
    for holder in HOLDERS:
        for way in itertools.islice(ways, 7):
            made.setdefault((holder, next(uses), way), None)
        next(uses)
    found = [program(*each) for each in made if _fits(*each)]
    attributes = [name for name, (_, _, change) in HOLDERS.items() if change.split(" = ")[0].startswith("m.")
                  and change.endswith("= W") and "[" not in change and name != "slots"]  # fmt: skip
    for holder in attributes:
        for write in list(WRITES)[1:]:
            each = (holder, next(uses), next(ways), write)
            found += [program(*each)] if _fits(*each) else []
    moved = itertools.cycle(MOVED_USES)
    taking_x = ("a cache", "an attribute of the input")
    for mover in MOVERS:
        some = ["directly", "by a local"] if mover in taking_x else list(itertools.islice(ways, 3))
        found += [moving(mover, next(moved), way) for way in some]
    return found


def _fits(holder: str, use: str, *_: str) -> bool:
    """True if it is a program at all: what is hashed or compared must allow that."""
    return not (holder == "the order of a dict" and use == "a keyword")
