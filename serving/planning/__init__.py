"""Plans of memory from what requests ask for: miss-ratio curves (`curves`) of a data set (`plan`)."""
