"""Where a table's rows live for a device, and what the device keeps of their ids."""
