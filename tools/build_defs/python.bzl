"""Python libraries and pytest targets, with no external repository and no toolchain.

Bazel's native py_* rules need rules_cc, which cannot be fetched without a network. What is needed here is less: which
files a test sees, and which source roots are on its path. The interpreter is the python3 of PATH.

This file and the BUILD files are also read by tools/checks/build_graph.py, as Python.
"""

PythonInfo = provider(
    doc = "Python sources, and where imports of them begin.",
    fields = {
        "files": "depset of the source files",
        "roots": "depset of directories for the path, relative to the workspace",
    },
)

def _collect(ctx):
    """The files and roots of the dependencies, and the runfiles that hold the files."""
    files = depset(ctx.files.srcs, transitive = [dep[PythonInfo].files for dep in ctx.attr.deps])
    roots = depset(transitive = [dep[PythonInfo].roots for dep in ctx.attr.deps])
    return files, roots

def _python_library_impl(ctx):
    files, roots = _collect(ctx)
    own_root = "/".join([part for part in [ctx.label.package, ctx.attr.root] if part])
    return [
        PythonInfo(files = files, roots = depset([own_root], transitive = [roots])),
        DefaultInfo(files = files, runfiles = ctx.runfiles(transitive_files = files)),
    ]

python_library = rule(
    doc = "Python sources under one source root. Visibility states who may depend on it: that is the layering.",
    implementation = _python_library_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = True, doc = "modules, and the data that lies beside them"),
        "deps": attr.label_list(providers = [PythonInfo]),
        "root": attr.string(default = "src", doc = "the source root, relative to the BUILD file; '' for its folder"),
    },
)

_LAUNCHER = """#!/usr/bin/env bash
# Written by pytest_test in tools/build_defs/python.bzl.
cd "$TEST_SRCDIR/$TEST_WORKSPACE"
exec python3 -P {main} --roots "{roots}" -- {arguments}
"""

def _pytest_test_impl(ctx):
    files, roots = _collect(ctx)
    launcher = ctx.actions.declare_file(ctx.label.name + ".sh")
    ctx.actions.write(
        launcher,
        _LAUNCHER.format(
            main = ctx.file._main.short_path,
            roots = ":".join(roots.to_list()),
            arguments = " ".join(ctx.attr.arguments + [file.short_path for file in ctx.files.srcs]),
        ),
        is_executable = True,
    )
    return [DefaultInfo(
        executable = launcher,
        runfiles = ctx.runfiles(
            files = ctx.files.data + ctx.files._settings + [ctx.file._main],
            transitive_files = files,
        ),
    )]

pytest_test = rule(
    doc = "Test files that run in one pytest session. Importing torch costs seconds, so a target holds many files.",
    implementation = _pytest_test_impl,
    test = True,
    attrs = {
        "srcs": attr.label_list(allow_files = [".py"]),
        "deps": attr.label_list(providers = [PythonInfo]),
        "data": attr.label_list(allow_files = True),
        "arguments": attr.string_list(doc = "for pytest, before the files"),
        "_main": attr.label(default = "//tools/build_defs:pytest_main.py", allow_single_file = True),
        # The constraints are an input because a result that was cached under another torch is no result.
        "_settings": attr.label_list(
            default = ["//:pyproject.toml", "//:constraints.txt"],
            allow_files = True,
        ),
    },
)

def pytest_suites(name, deps, suites = [], data = [], benchmark_deps = [], timeout = "long"):
    """One pytest_test per suite, such that each tests/test_*.py is in exactly one of them.

    A new test file joins the suite of the folder that it lies in, with no edit here.
    Benchmarks (benchmarks/test_*.py) form one more suite, where each body runs once, untimed.

    Args:
      name: the suite of the files that lie loose in tests/
      deps: python_library targets that the tests import
      suites: folders of tests/, each a suite of the same name
      data: further files that the tests read
      benchmark_deps: what the benchmarks import beside deps
      timeout: of each suite: short (1 minute), moderate (5), long (15)
    """
    sources = {suite: native.glob(["tests/%s/test_*.py" % suite], allow_empty = True) for suite in suites}
    loose = native.glob(["tests/test_*.py"], allow_empty = True)
    if loose:
        sources[name] = loose
    for suite, srcs in sources.items():
        if srcs:
            pytest_test(
                name = suite,
                srcs = srcs,
                data = data + _beside_tests("tests"),
                timeout = timeout,
                deps = deps,
            )

    benchmarks = native.glob(["benchmarks/test_*.py"], allow_empty = True)
    if benchmarks:
        pytest_test(
            name = "benchmarks",
            srcs = benchmarks,
            arguments = ["--benchmark-disable"],
            data = data + _beside_tests("benchmarks"),
            timeout = timeout,
            deps = deps + benchmark_deps,
        )

def _beside_tests(folder):
    """conftest.py, snapshots and other files that lie beside the test files."""
    return native.glob([folder + "/**"], exclude = [folder + "/**/test_*.py", "**/__pycache__/**"], allow_empty = True)

def source_tree(name = "tree", subpackages = []):
    """Every file of this folder, for the tests that read the repository as a whole: layers, installs, READMEs."""
    native.filegroup(
        name = name,
        srcs = native.glob(["**"], exclude = ["**/__pycache__/**", "**/.*/**", "outputs/**"]) + subpackages,
        visibility = [
            "//packages/vescale:__pkg__",
            "//tools:__subpackages__",
        ],
    )
