"""A forward whose Python does something beside computing leaves behind what it leaves in eager mode: nothing runs
twice.

Each line below is the beginning of a forward of a module that static mode records and tries; objects of `Obj` and its
neighbours count whatever is asked of them.
"""

import linecache
import random
import types
import warnings

import pytest
import torch
from torch import nn

from vescale_dtensor import Replicate, Shard
from vescale_dtensor.testing import fake_world, in_turns, slice_of
from vescale_plans import Boundary, Plan, explain_static, parallelize

WIDTH = 4
PLAN = Plan(
    mesh={"tp": 2},
    parameters={"up.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}, "*": {}},
    boundaries={"up": Boundary(input={"tp": Replicate()}), "down": Boundary(output={"tp": Replicate()})},
    data_axis=None,
)

SOURCE = """
import collections, functools, numpy, os, random
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F

@dataclass
class Data:
    v: object

N = [0]
class Obj:
    def __init__(self): self.v = 1
    def tick(self, *a, **k):
        N[0] += 1
        return 1
    def __index__(self): return self.tick()
    def __int__(self): return self.tick()
    def __float__(self): return float(self.tick())
    def __abs__(self): return self.tick()
    def __round__(self, *a): return self.tick()
    def __rmul__(self, o): self.tick(); return o
    def __radd__(self, o): self.tick(); return o
    def __eq__(self, o): self.tick(); return True
    def __hash__(self): self.tick(); return 1
    def __contains__(self, o): self.tick(); return True
    def __str__(self): self.tick(); return "a"
    def __repr__(self): self.tick(); return "a"
    def __lt__(self, o): self.tick(); return True
    def __neg__(self): self.tick(); return 1
    def __invert__(self): self.tick(); return 1
    def __enter__(self): self.tick(); return 1
    def __exit__(self, *a): pass
    def __iter__(self): self.tick(); return iter([1, 2])
    def __getitem__(self, i): self.tick(); return 1
    def __setitem__(self, i, v): self.tick()
    def __delitem__(self, i): self.tick()
    def __call__(self, *a): self.tick(); return 1
    def __reversed__(self): self.tick(); return iter([1])
    def __len__(self): self.tick(); return 1
    def __bool__(self): self.tick(); return True
    def __fspath__(self): self.tick(); return "a"
    def __matmul__(self, o): self.tick(); return o
    def __rsub__(self, o): self.tick(); return o
    def __format__(self, o): self.tick(); return "a"
    def __setattr__(self, n, v):
        N[0] += 1
        object.__setattr__(self, n, v)
    def __delattr__(self, n):
        N[0] += 1
class Meta(type):
    def __instancecheck__(cls, o): N[0] += 1; return True
    def __getattr__(cls, n): N[0] += 1; return 1
    def __call__(cls, *a): N[0] += 1; return 1
class WithMeta(metaclass=Meta): pass
class Gets:
    def __getattribute__(self, n):
        N[0] += 1
        return 1
class Desc:
    def __get__(self, o, k=None): N[0] += 1; return 2.0
    def __set__(self, o, v): N[0] += 1
class Class_:
    d = Desc()
class MyList(list):
    def append(self, x): N[0] += 1
    def __getitem__(self, i): N[0] += 1; return 1
class MyDict(dict):
    def __missing__(self, k): N[0] += 1; return 1
    def get(self, *a): N[0] += 1; return 1
class MyTensor(torch.Tensor): pass
def key(a): N[0] += 1; return a
class Middle(nn.Module):
    desc = Desc()
    def __init__(self):
        super().__init__()
        self.o = Obj(); self.l = [1, 2]; self.d = {"a": 1}; self.s = {1}; self.w = WithMeta
        self.g = Gets(); self.c = Class_()
        self.ml = MyList([1]); self.md = MyDict(); self.q = collections.deque([1]); self.n = 0
        self.buf = torch.ones(1); self.cfg = Data(1); self.lin = nn.Identity()
        self.register_buffer("b", torch.zeros(3))
    @property
    def prop(self): N[0] += 1; return 1
    @prop.setter
    def prop(self, v): N[0] += 1
    def forward(self, x):
        {body}
        return x * 2
def state(m):
    held = (N, m.l, m.d, m.s, list(m.q), m.n, m.cfg.v, sorted(m.__dict__), sorted(globals()), list(m.ml), len(m.md))
    ways = (torch.get_default_dtype(), m.b.tolist(), random.getstate()[1][:3], m.lin.training, os.environ.get("ADV"))
    return repr((held, ways, torch.initial_seed(), len(m.lin._forward_hooks)))
"""

BODIES = r"""
int(self.o)
float(self.o)
abs(self.o)
round(self.o)
x = x * self.o
sum([self.o, self.o])
x.sum(self.o)
self.o == 1
self.o in [1]
1 in self.o
self.d.get(self.o)
{self.o: 1}
{self.o}
str(self.o)
"%s" % self.o
"{}".format(self.o)
f"{self.o!r}"
"".join(str(a) for a in [self.o])
sorted([self.o, self.o])
sorted([1, 2], key=key)
min([1, 2], key=key)
max(1, 2, key=key)
list(map(key, [1]))
list(filter(key, [1]))
functools.reduce(lambda a, b: key(a), [1, 2, 3])
-self.o
~self.o
self.o < 1
[*self.o]
(lambda *a: 1)(*self.o)
self.o[0]
self.o[0] = 1
del self.o[0]
self.o()
reversed(self.o)
len(self.o)
not self.o
self.o and 1
1 if self.o else 2
while self.o: break
assert self.o
self.o @ x
x - self.o
self.o.z = 1
del self.o.v
isinstance(1, self.w)
self.w.zz
self.w()
self.g.anything
self.c.d
self.desc
self.desc = 1
self.prop
self.prop = 1
self.ml.append(1)
self.ml[0]
self.md["q"]
self.md.get("q")
self.l.append(1)
self.l += [1]
self.l[0] = self.l[0] + 1
self.l[:] = self.l + [1]
list.append(self.l, 1)
dict.__setitem__(self.d, len(self.d), 1)
operator_ = __import__("operator"); operator_.setitem(self.d, len(self.d), 1)
self.d.setdefault(len(self.d), 1)
self.d |= {len(self.d): 1}
self.d.update(z=len(self.d))
self.s.add(len(self.s))
self.s |= {len(self.s)}
self.q.append(1)
self.n += 1
self.__dict__["n"] += 1
self.__dict__.update(n=self.n + 1)
vars(self)["n"] = self.n + 1
setattr(self, "n", self.n + 1)
object.__setattr__(self, "n", self.n + 1)
super().__setattr__("n", self.n + 1)
nn.Module.__setattr__(self, "n", self.n + 1)
self.__setattr__("n", self.n + 1)
type(self).cnt = getattr(type(self), "cnt", 0) + 1; self.n = type(self).cnt
globals()["GG"] = globals().get("GG", 0) + 1; N[0] = GG
N[0] += 1
N.append(1)
for self.n in range(3): pass
[0 for self.n in range(self.n + 2)]
(a, self.n) = (1, self.n + 1)
a, *self.l = [1, *self.l, 1]
self.cfg.v += 1
f = self.l.append; f(1)
f = self.l.append; [f(a) for a in (1,)]
getattr(self.l, "append")(1)
getattr(self, "tick", lambda: N.append(1))()
(N.append(1), 1)[1]
a = N; b = a; b.append(1)
a = [N]; a[0].append(1)
a = {"n": N}; a["n"].append(1)
a = (N,); a[0].append(1)
for a in (N,): a.append(1)
[a.append(1) for a in [N]]
a = N if x.shape[0] > 0 else []; a.append(1)
a = [] if x.shape[0] > 100 else N; a += [1]
a = self.l or []; a.append(1)
a = dict(n=N); a.pop("n").append(1)
a = [1, N]; a.pop().append(1)
a, b = 1, N; b.append(1)
eval("N.append(1)")
random.random()
random.seed(len(self.l))
torch.manual_seed(3)
os.environ["ADV"] = os.environ.get("ADV", "") + "a"
self.lin.eval() if self.lin.training else self.lin.train()
self.lin.register_forward_hook(lambda *a: None)
self.zero_grad(); N.append(2)
self.register_buffer("bb" + str(len(self._buffers)), torch.zeros(1))
self.b.add_(1)
self.b += 1
self.b[0] += 1
self.b.copy_(self.b + 1)
torch.add(self.b, 1, out=self.b)
torch.nn.init.ones_(self.b); self.b.fill_(self.b.sum() + 1)
self.b.data.add_(1)
self.b = self.b + 1
self._buffers["b"] = self.b + 1
x.marked = 1; N.append(1)
x.register_hook(lambda g: N.append(1)) if x.requires_grad else None
warnings_ = __import__("warnings"); warnings_.warn("x"); N.append(1)
try: N.append(1)\n        except Exception: pass
try: raise ValueError\n        except ValueError: N.append(1)
try: 1 / 0\n        except ZeroDivisionError: N.append(1)
try: self.nothing\n        except AttributeError: N.append(1)
try: pass\n        finally: N.append(1)
with torch.no_grad(): N.append(1)
with self.o: pass
def f(): N.append(1)\n        f()
def f(): N.append(1)\n        [f for f in (f,)][0]()
def f():\n            global GG2\n            GG2 = 1 + globals().get("GG2", 0)\n        f(); N[0] = GG2
import random as r; r.random()
from random import random as r; r()
class K:\n            N.append(1)
match self.o:\n            case 1: N.append(1)\n            case _: N.append(1)
lambda: N.append(1)
(lambda n=N: n.append(1))()
(lambda *n: n[0].append(1))(N)
(lambda **n: n["a"].append(1))(a=N)
functools.partial(N.append, 1)()
functools.partial(lambda a: a.append(1))(N)
torch.utils.data.get_worker_info() or N.append(1)
copy_ = __import__("copy"); copy_.copy(self.o); N.append(1)
torch.stack([x, x]).unbind(N.append(1) or 0)
x = torch.relu(x) if not N.append(1) else x
x = F.pad(x, (0, 0) if N.append(1) is None else (1, 1))
x = x + len([N.append(1)])
N.sort(key=lambda a: self.l.append(1))
N.__setitem__(0, N[0] + 1)
N.__iadd__([1])
N.insert(0, 1)
next(iter([N])).append(1)
list(zip([N], [1]))[0][0].append(1)
dict([("a", N)])["a"].append(1)
list(reversed([N]))[0].append(1)
list(enumerate([N]))[0][1].append(1)
max([N], [[]]).append(1)
sorted([N])[0].append(1)
[N][0 if x.shape[0] else 0].append(1)
{"a": N}.get("a", []).append(1)
(N or []).append(1)
(N and N).append(1)
type(N).append(N, 1)
self.l.__class__.append(N, 1)
N.extend(N[:1])
N.extend(a for a in [1])
del N[0]; N.append(5); N.append(6)
del self.d["a"]; self.d["a"] = len(self.d); N.append(1)
self.q.rotate(1); self.q.append(2)
self.lin.weird = getattr(self.lin, "weird", 0) + 1; self.n = self.lin.weird
self.lin.__dict__["weird"] = self.lin.__dict__.get("weird", 0) + 1; N.append(1)
id(x); N.append(1)
time_ = __import__("time"); time_.time(); N.append(1)
self.add_module("m" + str(len(self._modules)), nn.Identity())
self.train(not self.training); self.train(not self.training); N.append(1)
nn.Linear(2, 2); N.append(torch.initial_seed() % 3)
torch.rand(2); N.append(1)
x = torch.cat([x, x[..., :0]], -1); [].append(N.append(1))
numpy.random.rand(); N.append(1)
[*map(N.append, [1])]
any(N.append(1) for _ in range(2))
all(map(lambda a: N.append(a), (1, 2)))
"".join(map(lambda a: N.append(1) or "a", "ab"))
{a: N.append(1) for a in (1, 2)}
logging_ = __import__("logging"); logging_.getLogger("x").debug("y"); N.append(1)
x.shape.__class__; N.append(1)
torch.jit.is_scripting() or N.append(1)
slice(N.append(1), None)
isinstance(N.append(1), int)
super().train(self.training); N.append(1)
self.half if False else N.append(1)
self.requires_grad_(True); N.append(1)
self.apply(lambda m: N.append(1))
[m.__dict__.update(z=1) for m in self.modules()]; N.append(1)
list(self.modules())[1].__dict__.update(z=1); N.append(1)
list(self.named_parameters()); N.append(1)
""".strip().split("\n")
NOTHING = {"lambda: N.append(1)"}  # what may run static, for it only looks


class Net(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.middle = middle
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.middle(self.up(x)))


def left_behind(body, mode):
    """After each of four calls what the program holds, or the error; and the verdict."""
    source = SOURCE.replace("{body}", body.replace("\\n", "\n"))
    file = f"<static traces: {body}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    made = types.ModuleType("program")
    exec(compile(source, file, "exec"), made.__dict__)
    torch.manual_seed(0)
    random.seed(0)
    model, _ = parallelize(PLAN, Net(made.Middle()), mode=mode)
    seen = []
    for step in range(4):
        try:
            model(torch.full((2, 3, WIDTH), float(step)))
        except Exception as error:
            seen.append(type(error))
        seen.append(made.state(model.middle))
    return seen, explain_static(model).calls["middle"][0] if mode != "eager" else ""


CASES = [(body, "static") for body in BODIES]
CASES += slice_of([(body, "auto") for body in BODIES], 8)


@in_turns(3)
@pytest.mark.parametrize(("body", "mode"), CASES)
def test_nothing_runs_twice(body, mode, monkeypatch):
    with fake_world(2), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monkeypatch.setenv("ADV", "")
        wanted, _ = left_behind(body, "eager")
        monkeypatch.setenv("ADV", "")
        found, verdict = left_behind(body, mode)
    assert found == wanted
    assert (verdict == "static") == (body in NOTHING)
