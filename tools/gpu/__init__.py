"""`make gpu`: what only a GPU can show, in one command, offline, with torch as it is installed.

    random_numbers   (a) fills, factories, dropout: shards against the device's own, to the bit; attention
    training         (b) the cases of `training_cases` on the device: by ranks of gloo that share a GPU
    host_waits       (c) a step of one rank in a world without processes: where the host waits for the device
    block_ratios     (d) blocks by hand, ours, torch's DTensor, at three widths
    memory           (e) the allocator's peak against a dry run's
    calibration      (f) `vescale calibrate`
    premise          (g) what the reproducible mode takes for granted, and what it costs
    one_device       (h) a Llama's step by plain torch, compiled, and by ours in each mode
    attention        (i) HuggingFace's attention implementations by the device's own kernels
    nccl             (j) ranks over NCCL that may share a GPU: collectives, trainings, faults; where it is named
    graphs           (l) whole steps from a graph, collectives included, against eager ones; where it is named
    peers            (k) a Llama's step beside what people use, and its products alone; where it is named

`python -m gpu` runs them one after the other, each in a process of its own and within its bound, and writes
results/<date>-gpu.json. What is written is not run again, so that a run that was cut off goes on (`--again` starts
anew). It ends with status 1 where a part failed, found something, or did not come to all of its questions.
`--device second` rehearses on the second device.
"""
