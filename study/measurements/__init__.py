"""The kinds of measurement, a file each; `study.definition.KINDS` has an entry for each."""
