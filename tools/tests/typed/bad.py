"""A user's mistakes, each of which a type checker finds in its line."""

from torch import nn

import vescale
from vescale import Plan, Shard

net = nn.Linear(2, 2)
plan = Plan(mesh={"dp": 2}, parameters={})
vescale.parallelize(net, plan)  # error: call-overload
vescale.parallelize(plan, net, mode="fast")  # error: call-overload
vescale.parallelize(plan, net)[1].step()  # error: attr-defined
vescale.save("checkpoints", {"model": net}, stp=3)  # error: call-arg
Plan(mesh=["dp"], parameters={})  # error: arg-type
Plan(mesh={"dp": "2"}, parameters={})  # error: dict-item
Plan(mesh={"dp": 2}, parameters={"*": Shard(0)})  # error: dict-item
Plan(mesh={"dp": 2}, parameters={}, zero="3")  # error: arg-type
