"""How ids make bags, by number, as `serving.modules.inputs` has it."""

IDS, FIXED, LENGTHS, OFFSETS, ENDS = range(5)
