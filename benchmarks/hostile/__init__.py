"""Attacks the product with bad settings, files, directories, environments and moments, and judges
what it does.

    python -m benchmarks.hostile                                # every group, all cases
    python -m benchmarks.hostile --groups=settings,weights --share=0.1 --seed=7
    python -m benchmarks.hostile --record=benchmarks/hostile/record.json --page=docs/faults.md

Every case must end in one message (expected, got, how to fix; a non-zero exit) or be done right;
nothing on disk may be lost. Each group is a file of this package. The table counts verdicts per
group; the record keeps one row per fault, and the page "What can go wrong" is written from it.
"""
