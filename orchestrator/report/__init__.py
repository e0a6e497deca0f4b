"""What people read: tables, the plan, its price, and prediction against measurement."""
