; c = a * b of n x n f32, n a multiple of 16: a block of 16 x 16 threads a tile, both factors staged in shared memory.
target triple = "nvptx64-nvidia-cuda"

@tile_a = internal addrspace(3) global [256 x float] undef, align 16
@tile_b = internal addrspace(3) global [256 x float] undef, align 16

declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.tid.y()
declare i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ctaid.y()
declare void @llvm.nvvm.barrier.cta.sync.aligned.all(i32)
declare float @llvm.fma.f32(float, float, float)

define ptx_kernel void @matmul(ptr addrspace(1) noalias readonly %a, ptr addrspace(1) noalias readonly %b, ptr addrspace(1) noalias %c, i32 %n) #0 {
entry:
  %x = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %y = call i32 @llvm.nvvm.read.ptx.sreg.tid.y()
  %bx = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
  %by = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.y()
  %row0 = shl i32 %by, 4
  %row = or disjoint i32 %row0, %y
  %column0 = shl i32 %bx, 4
  %column = or disjoint i32 %column0, %x
  %y16 = shl i32 %y, 4
  %mine = or disjoint i32 %y16, %x
  %mine64 = zext i32 %mine to i64
  %put_a = getelementptr float, ptr addrspace(3) @tile_a, i64 %mine64
  %put_b = getelementptr float, ptr addrspace(3) @tile_b, i64 %mine64
  %row_n = mul i32 %row, %n
  br label %tiles
tiles:
  %t = phi i32 [ 0, %entry ], [ %t_next, %after ]
  %sum = phi float [ 0.0, %entry ], [ %sum_next, %after ]
  %more = icmp ult i32 %t, %n
  br i1 %more, label %load, label %store
load:
  %ta = add i32 %t, %x
  %ia = add i32 %row_n, %ta
  %ia64 = zext i32 %ia to i64
  %pa = getelementptr float, ptr addrspace(1) %a, i64 %ia64
  %va = load float, ptr addrspace(1) %pa
  store float %va, ptr addrspace(3) %put_a
  %tb = add i32 %t, %y
  %tbn = mul i32 %tb, %n
  %ib = add i32 %tbn, %column
  %ib64 = zext i32 %ib to i64
  %pb = getelementptr float, ptr addrspace(1) %b, i64 %ib64
  %vb = load float, ptr addrspace(1) %pb
  store float %vb, ptr addrspace(3) %put_b
  call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0)
  br label %inner
inner:
  %k = phi i32 [ 0, %load ], [ %k_next, %inner ]
  %s = phi float [ %sum, %load ], [ %s_next, %inner ]
  %ak = add i32 %y16, %k
  %ak64 = zext i32 %ak to i64
  %pak = getelementptr float, ptr addrspace(3) @tile_a, i64 %ak64
  %vak = load float, ptr addrspace(3) %pak
  %k16 = shl i32 %k, 4
  %bk = add i32 %k16, %x
  %bk64 = zext i32 %bk to i64
  %pbk = getelementptr float, ptr addrspace(3) @tile_b, i64 %bk64
  %vbk = load float, ptr addrspace(3) %pbk
  %s_next = call float @llvm.fma.f32(float %vak, float %vbk, float %s)
  %k_next = add i32 %k, 1
  %last = icmp eq i32 %k_next, 16
  br i1 %last, label %after, label %inner
after:
  %sum_next = phi float [ %s_next, %inner ]
  call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0)
  %t_next = add i32 %t, 16
  br label %tiles
store:
  %ic = add i32 %row_n, %column
  %ic64 = zext i32 %ic to i64
  %pc = getelementptr float, ptr addrspace(1) %c, i64 %ic64
  store float %sum, ptr addrspace(1) %pc
  ret void
}

attributes #0 = { "nvvm.reqntid"="16,16,1" }
