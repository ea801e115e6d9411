"""The page of a comparison in a browser without a window: no error, it folds, nothing wider than the window.

Skipped where there is no Chromium.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import vescale

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
_WATCH = "<script>const wrong = []; window.onerror = text => { wrong.push(text) };</script>"
_TELL = """<script>
const found = {}; (() => { %s })();
found.wrong = wrong; found.wider = document.documentElement.scrollWidth - window.innerWidth;
document.title = "told " + JSON.stringify(found);
</script>"""


def driven(page: str, folder: Path, width: int, program: str = "") -> dict:
    """What `program` put into `found`, the errors, and by how many pixels the page is wider than its window."""
    place = folder / "page.html"
    place.write_text(page.replace("<style>", _WATCH + "<style>", 1).replace("</html>", _TELL % program + "</html>"))
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}"]
    command += [f"--window-size={width},900", "--virtual-time-budget=2000", "--dump-dom", place.as_uri()]
    home = {**os.environ, "HOME": str(folder)}  # a sandbox has none
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=home)
    told = re.search(r"<title>told (.*?)</title>", done.stdout)
    assert told, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(told[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.mark.parametrize("width", [700, 1600])
def test_a_comparison_folds_what_follows(tmp_path: Path, width: int) -> None:
    for name, wrong in (("a", False), ("b", True)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with vescale.record(model, tmp_path / name, optimizer=optimizer):
            for step in range(4):
                with torch.no_grad():
                    model[2].weight[0, 0] += 1e-5 * (wrong and step == 1)
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    vescale.compare(tmp_path / "a", tmp_path / "b").write_html(tmp_path / "compared.html")
    program = """
      found.lines = document.querySelectorAll("svg polyline").length;
      const folds = [...document.querySelectorAll("details")], before = document.body.scrollHeight;
      found.folded = folds.length > 0 && folds.every(one => !one.open);
      folds.forEach(one => { one.open = true });
      found.opened = document.body.scrollHeight > before;
    """
    found = driven((tmp_path / "compared.html").read_text(), tmp_path, width, program)
    assert found.pop("wider") <= 0
    assert found == {"lines": 3, "folded": True, "opened": True, "wrong": []}
