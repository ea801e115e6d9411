"""(rules of this family follow)"""
