"""Mutants of the engine: whether the second device's trainings see what would be wrong on a GPU.

    grammar     which places of the engine's sources may be changed, and to what: found by syntax tree
    effects     what stands in a place's stead while a training runs: it looks whether the place does anything, or
                does it wrong
    patched     puts it there: in the functions of a process that is there already
    hunt        which trainings reach a place (survey), and what they say of a mutant (verdict)

`python -m mutants` surveys all trainings, draws places by seed, runs each as a mutant against the quickest training in
which the place has an effect, and writes results/<date>-mutants.json. A place without an effect in any training is no
mutant: to leave it out changes nothing there, by what was seen (a `contiguous` of what is contiguous, a wait for what
has arrived).
"""
