"""The ranks' imports begin while pytest still collects; an optimizer, when it is made, imports torch._dynamo."""

from vescale_testkit import warm_up

warm_up("torch._dynamo")
