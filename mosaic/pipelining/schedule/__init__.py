"""Schedules that ranks execute: their actions as data, made from orders, and checked."""
