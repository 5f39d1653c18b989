import hashlib, subprocess, tempfile
from pathlib import Path
FLAGS = "-O3 -march=native -mprefer-vector-width=512 -ffp-contract=off -fno-math-errno -fno-trapping-math -fwrapv --param=vect-max-peeling-for-alignment=0 -fopenmp -shared -fPIC -w -std=c++17".split()
def digest(text):
    return hashlib.sha256((text+repr(FLAGS)).encode()).hexdigest()[:40]+".so"
class build:
    def __init__(self, texts):
        self.d=Path(tempfile.mkdtemp()); self.ps=[]
        for i,t in enumerate(texts):
            (self.d/f"k{i}.cpp").write_text(t)
            self.ps.append(subprocess.Popen(["g++",*FLAGS,str(self.d/f"k{i}.cpp"),"-o",str(self.d/f"k{i}.so")],stderr=subprocess.PIPE,text=True))
    def finish(self):
        for i,p in enumerate(self.ps):
            _,e=p.communicate()
            if p.returncode: raise RuntimeError(e[:3000]+str(self.d))
        return [self.d/f"k{i}.so" for i in range(len(self.ps))]
    def close(self): pass
