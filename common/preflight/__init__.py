"""Everything before the first step: flags, reading and checking the input, settling sizes, showing the plan."""
