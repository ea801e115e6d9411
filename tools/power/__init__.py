"""The power meter: for each test its CPU seconds, and which mutants of the packages it kills.

    places      which expressions and statements may be changed, and to what; writes the tree that holds all mutants
    switch      in that tree, asked at each place: which mutant is on? It imports nothing of ours
    board       the memory in which all processes of a run see both
    session     runs tests in a pytest that has collected once, in forks: a mutant leaves no state behind
    report      which tests are redundant, which are slow for what they kill, which mutants nothing kills
    core        the tests that `make test` runs, by what is known of their cost and of their kills

All mutants lie in one copy of the sources, behind a switch in shared memory, so that no rank is started anew for a
mutant. Only tests that reach a mutant's place meet it, cheapest first, until five have killed it or 60 CPU seconds are
gone. A test that hangs is no killer. Whole files, a third of the mutants, are held out: a choice of tests is judged on
those alone.

    make power AREAS="layouts rules" TESTS=packages/dtensor/tests     goes on where it was stopped; ends with the report
    make power AREAS="rng plans" EACH=3                               areas by name, or whole packages
    make power CHOOSE=1                                               from what was found at this commit
"""
