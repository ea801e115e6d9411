"""The workers import what every test here needs, beside the collection of tests."""

from vescale_dtensor.testing import warm_up

warm_up("torch._dynamo", "vescale_checkpoint")
