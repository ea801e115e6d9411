"""An IDE's debugger, attached to one of two ranks under torchrun, by the protocol that editors speak."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vescale_testkit import in_turns

pytest.importorskip("debugpy")

SCRIPT = """
import os, sys, torch, vescale
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        hidden = self.up(x)
        gate = hidden.relu()
        return self.down(gate)

if len(sys.argv) > 1 and os.environ["RANK"] == "1":
    import debugpy
    _, port = debugpy.listen(("127.0.0.1", 0))
    print("port", port, flush=True)
    debugpy.wait_for_client()
torch.manual_seed(0)
rows, columns = {"tp": vescale.Shard(0)}, {"tp": vescale.Shard(1)}
plan = vescale.Plan(mesh={"tp": 2}, parameters={"up.*": rows, "down.weight": columns, "*": {}})
model, optimizer = vescale.parallelize(plan, Model(), torch.optim.AdamW)
for step in range(3):
    loss = model(torch.randn(8, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item().hex()
    if os.environ["RANK"] == "0":
        print("loss", value, flush=True)
"""
LINE = 1 + SCRIPT.splitlines().index("        gate = hidden.relu()")


class Editor:
    """The editor's end of the debug adapter protocol."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=240)
        self.stream = self.socket.makefile("rb")
        self.number = 0
        self.heard: list[dict] = []

    def close(self) -> None:
        self.stream.close()
        self.socket.close()

    def send(self, command: str, **arguments: Any) -> int:
        self.number += 1
        body = json.dumps({"seq": self.number, "type": "request", "command": command, "arguments": arguments}).encode()
        self.socket.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        return self.number

    def wait_for(self, **wanted: Any) -> dict:
        """The next message whose fields are these."""
        while True:
            for message in self.heard:
                if all(message.get(name) == value for name, value in wanted.items()):
                    self.heard.remove(message)
                    return message
            length = 0
            while (line := self.stream.readline()).strip():
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            assert length, f"the debugger is gone; heard: {self.heard}"
            self.heard.append(json.loads(self.stream.read(length)))

    def ask(self, command: str, **arguments: Any) -> dict:
        return self.wait_for(type="response", request_seq=self.send(command, **arguments))


@contextlib.contextmanager
def launched(script: Path, *arguments: str) -> Iterator[subprocess.Popen]:
    """Under torchrun, and not after the block."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def losses_of(text: str) -> list[str]:
    return re.findall(r"^loss (\S+)$", text, re.M)


@in_turns(3)
def test_one_rank_in_an_ide(tmp_path: Path) -> None:
    """It stops at a line, shows what is there, refuses what would communicate, steps, and trains on undisturbed."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with launched(script, "debug") as process:
        port = int(next(line for line in process.stdout if line.startswith("port")).split()[1])
        editor = Editor(port)
        editor.ask("initialize", adapterID="test", linesStartAt1=True, pathFormat="path")
        attached = editor.send("attach", justMyCode=True)
        editor.wait_for(type="event", event="initialized")
        editor.ask("setBreakpoints", source={"path": str(script)}, breakpoints=[{"line": LINE}])
        editor.ask("configurationDone")
        editor.wait_for(type="response", request_seq=attached)

        def stopped() -> tuple[int, dict]:
            thread = editor.wait_for(type="event", event="stopped")["body"]["threadId"]
            return thread, editor.ask("stackTrace", threadId=thread)["body"]["stackFrames"][0]

        def said(expression: str) -> tuple[bool, str]:
            answer = editor.ask("evaluate", expression=expression, frameId=frame["id"], context="watch")
            return answer["success"], answer["body"]["result"] if answer["success"] else answer["message"]

        thread, frame = stopped()
        assert (frame["line"], frame["name"]) == (LINE, "forward")
        scope = editor.ask("scopes", frameId=frame["id"])["body"]["scopes"][0]
        shown = editor.ask("variables", variablesReference=scope["variablesReference"])["body"]["variables"]
        hidden = next(one for one in shown if one["name"] == "hidden")
        assert "DTensor([8, 16] S(1) on " in hidden["value"]
        unfolded = editor.ask("variables", variablesReference=hidden["variablesReference"])
        assert {"shape", "grad_fn"} <= {one["name"] for one in unfolded["body"]["variables"]}

        assert said("hidden.shape") == (True, "torch.Size([8, 16])")
        assert said("hidden.to_local().shape") == (True, "torch.Size([8, 8])")
        assert said("torch.ones(2).sum().item()") == (True, "2.0")
        for expression in ("hidden.full_tensor()", "hidden.sum().item()", "torch.distributed.barrier()"):
            succeeded, message = said(expression)
            assert not succeeded and "was not begun: the debugger of an IDE asked for it" in message
            assert "vescale.breakpoint()" in message

        editor.ask("setBreakpoints", source={"path": str(script)}, breakpoints=[])
        for line in (LINE + 1, LINE + 2):  # the next one returns to its caller, after a sum over both ranks
            editor.ask("next", threadId=thread)
            thread, frame = stopped()
            if line == LINE + 1:
                assert frame["line"] == line
        editor.ask("continue", threadId=thread)
        editor.wait_for(type="event", event="terminated")
        editor.ask("disconnect")  # the debugger's own process holds the output open as long
        editor.close()
        told, _ = process.communicate(timeout=240)
        assert process.returncode == 0
    with launched(script) as process:
        undisturbed, _ = process.communicate(timeout=240)
    assert len(losses_of(told)) == 3 and losses_of(told) == losses_of(undisturbed)
