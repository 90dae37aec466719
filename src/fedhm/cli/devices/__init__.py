"""What a device can afford: budgets, plans of fleets, and measuring one."""
