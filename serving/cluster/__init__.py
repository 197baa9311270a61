"""Tables whose rows lie on other hosts: asking their owners, and describing them."""
