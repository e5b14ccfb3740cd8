"""Published tables of attacks and defences, and what one hostile client does to four papers."""
