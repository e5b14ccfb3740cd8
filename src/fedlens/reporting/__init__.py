"""Who is asked to take part in a round, who reports, and when: on a virtual clock."""
